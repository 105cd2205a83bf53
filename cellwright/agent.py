"""The public names of the agent; harness/agent/README.md describes them.

Only `ModelClient` needs the extra `agent`, and is imported when it is first used.
"""

from typing import TYPE_CHECKING

from .harness.agent.agent import (
    Agent,
)
from .harness.agent.agent_memory import (
    AgentMemory,
    Fact,
    Recipe,
)
from .harness.agent.alita import (
    AlitaConfig,
    AlitaError,
    HierarchicalMemorySystem,
    HybridPlanner,
    ManagerAgent,
    McpBox,
    MCPSystem,
    Orchestrator,
    PlanningError,
    SandboxExecutor,
    ToolCreationError,
    ToolExecutionError,
    ToolExecutionResult,
    WebAgent,
)
from .harness.agent.planner import (
    Planner,
    Toolsmith,
)
from .harness.agent.prompts import (
    AgentLimits,
    AgentUsage,
    ChatModel,
    Message,
    ModelReply,
    Price,
    Sampling,
)
from .harness.agent.research import (
    Research,
)
from .harness.agent.transcript import (
    AgentEvent,
    AgentResult,
)

if TYPE_CHECKING:
    from .harness.agent.model import ModelClient

__all__ = [
    "Agent",
    "AgentEvent",
    "AgentLimits",
    "AgentMemory",
    "AgentResult",
    "AgentUsage",
    "AlitaConfig",
    "AlitaError",
    "ChatModel",
    "Fact",
    "HierarchicalMemorySystem",
    "HybridPlanner",
    "MCPSystem",
    "ManagerAgent",
    "McpBox",
    "Message",
    "ModelClient",
    "ModelReply",
    "Orchestrator",
    "Planner",
    "PlanningError",
    "Price",
    "Recipe",
    "Research",
    "Sampling",
    "SandboxExecutor",
    "ToolCreationError",
    "ToolExecutionError",
    "ToolExecutionResult",
    "ToolRegistry",
    "Toolsmith",
    "WebAgent",
]

ToolRegistry = McpBox  # as the blueprint calls it


def __getattr__(name: str) -> type:
    """Import `ModelClient`; without the extra it raises PolicyError once it is used."""
    if name != "ModelClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .policies.errors import PolicyError

    try:
        from .harness.agent.model import ModelClient
    except PolicyError as error:
        from .policies.extras import stand_in

        return stand_in(name, "agent", error.what)
    return ModelClient

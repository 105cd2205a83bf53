"""The public names of the agent; harness/agent/README.md describes them.

Only `ModelClient` needs the extra `agent`, and is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from .harness.agent.agent import Agent as Agent
from .harness.agent.alita import AlitaConfig as AlitaConfig
from .harness.agent.alita import AlitaError as AlitaError
from .harness.agent.alita import HierarchicalMemorySystem as HierarchicalMemorySystem
from .harness.agent.alita import HybridPlanner as HybridPlanner
from .harness.agent.alita import ManagerAgent as ManagerAgent
from .harness.agent.alita import McpBox as McpBox
from .harness.agent.alita import MCPSystem as MCPSystem
from .harness.agent.alita import Orchestrator as Orchestrator
from .harness.agent.alita import PlanningError as PlanningError
from .harness.agent.alita import SandboxExecutor as SandboxExecutor
from .harness.agent.alita import ToolCreationError as ToolCreationError
from .harness.agent.alita import ToolExecutionError as ToolExecutionError
from .harness.agent.alita import ToolExecutionResult as ToolExecutionResult
from .harness.agent.alita import WebAgent as WebAgent
from .harness.agent.limits import AgentLimits as AgentLimits
from .harness.agent.limits import AgentUsage as AgentUsage
from .harness.agent.limits import Price as Price
from .harness.agent.memory import AgentMemory as AgentMemory
from .harness.agent.memory import Fact as Fact
from .harness.agent.memory import Recipe as Recipe
from .harness.agent.messages import ChatModel as ChatModel
from .harness.agent.messages import Message as Message
from .harness.agent.messages import ModelReply as ModelReply
from .harness.agent.messages import Sampling as Sampling
from .harness.agent.outcome import AgentEvent as AgentEvent
from .harness.agent.outcome import AgentResult as AgentResult
from .harness.agent.planner import Planner as Planner
from .harness.agent.research import Research as Research
from .harness.agent.toolsmith import Toolsmith as Toolsmith

ToolRegistry = McpBox  # as the blueprint calls it

if TYPE_CHECKING:
    from .harness.agent.model import ModelClient as ModelClient


def __getattr__(name: str) -> Any:
    """Import `ModelClient`; raises PolicyError without the extra."""
    if name == "ModelClient":
        from .harness.agent.model import ModelClient

        return ModelClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

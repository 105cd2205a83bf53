"""The public names of the agent (extra `agent`); harness/agent/README.md describes them."""

from .harness.agent.agent import Agent as Agent
from .harness.agent.limits import AgentLimits as AgentLimits
from .harness.agent.limits import AgentUsage as AgentUsage
from .harness.agent.limits import Price as Price
from .harness.agent.messages import ChatModel as ChatModel
from .harness.agent.messages import Message as Message
from .harness.agent.messages import ModelReply as ModelReply
from .harness.agent.messages import Sampling as Sampling
from .harness.agent.model import ModelClient as ModelClient
from .harness.agent.outcome import AgentEvent as AgentEvent
from .harness.agent.outcome import AgentResult as AgentResult
from .harness.agent.toolsmith import Toolsmith as Toolsmith

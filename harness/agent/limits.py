"""`AgentLimits`: the budget of one run of an agent, and `AgentUsage`, what it has used."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ...policies.errors import PolicyError
from .messages import ModelReply

_PER = 1_000_000  # tokens of a price


class Price(NamedTuple):
    """Money for a million tokens, in any one currency."""

    input: float
    output: float


class AgentUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has used: `wall_seconds` while it was worked on, `cpu_seconds` of its cells, `money`
    by the table of prices."""

    steps: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    money: float = 0.0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget of one run, and `step_seconds`, the wall time of one program of it; a program that
    runs when the `wall_seconds` of the run are over is ended.

    The policy's `cpu_seconds` end a program that computes; `step_seconds` are longer than its
    `wall_seconds` usually are, because a program waits for the model while a tool is made.

    A run that has used one of them up ends with the reason `budget`, and can be resumed with more.
    `prices`: the name of a model -> its Price; a model that is not in it costs nothing.
    """

    steps: int = 30
    tokens: int = 1_000_000
    wall_seconds: float = 3600.0
    cpu_seconds: float = 600.0
    money: float = 1e9
    step_seconds: float = 600.0
    prices: Mapping[str, Price] = MappingProxyType({})

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "wall_seconds", "cpu_seconds", "money", "step_seconds"):
            if not getattr(self, name) > 0:
                raise PolicyError(f"limits.{name}: must be > 0, got {getattr(self, name)!r}")

    def cost(self, model: str, reply: ModelReply) -> float:
        """Return the price of a reply."""
        price = self.prices.get(model, Price(0.0, 0.0))
        return (reply.input_tokens * price.input + reply.output_tokens * price.output) / _PER

    def spent(self, used: AgentUsage) -> str:
        """Return which budget is used up, in words; empty if none is."""
        for name in ("steps", "tokens", "wall_seconds", "cpu_seconds", "money"):
            if getattr(used, name) >= getattr(self, name):
                return f"the budget of {getattr(self, name):g} {name.replace('_', ' ')} is used up"
        return ""

    def left(self, used: AgentUsage) -> str:
        """Return what is left, for the model."""
        steps = self.steps - used.steps
        tokens = self.tokens - used.tokens
        return f"{steps} step{'' if steps == 1 else 's'} and {max(tokens, 0):,} tokens are left"

"""`Tool`: a tool that can be called; `Caller`: the execution, session or agent for which it is called.

A call that a tool makes in turn belongs to the caller of that tool: in the trail, in depth, and in the
tools that it may call.
"""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ...policies.tools import Tools
from ...runner.audit.spans import Span
from ...runner.messages import Answer, Call
from .meter import Meter

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog
    from ..privacy.scope import PrivacyScope
    from ..schemas.spec import ToolSpec
else:  # their imports take long; help() has msgspec evaluate the annotations of Caller
    AuditLog = PrivacyScope = Any


class PendingCall(Protocol):
    """A call that a run records (`LiveCall` in runs/recorder.py); `call` identifies it in the run."""

    call: str

    def begin(self, tool_digest: str) -> None:
        """Record the call of a tool with this digest; on RegistryError it must not be made."""


class CallRecorder(Protocol):
    """Answers the calls of a durable run (`RunRecorder` in runs/recorder.py)."""

    @property
    def run(self) -> str:
        """The id of the run."""

    def answer(
        self, call: Call, arguments: dict[str, Any], anew: Callable[[PendingCall], Answer],
        tell: Callable[[Answer], None], *, may_be_repeated: bool,
    ) -> None:  # fmt: skip
        """Pass the answer to `call` to `tell`: the recorded one, or the one that `anew` returns."""


class Caller(msgspec.Struct, frozen=True):
    """The execution, session or agent for which a tool is called.

    `id` is its id or name; `traceparent` is the span that causes the call, or `within` is, if a tool
    makes it; `depth` counts the tools that called each other before this call; `tools` are the only
    tools that it may call, None means all; `rules` are those of its policy; `meter` counts its calls;
    `privacy` holds the personal data that it gets as tokens.
    """

    id: str = ""
    traceparent: str = ""
    depth: int = 0
    tools: frozenset[str] | None = None
    rules: Tools = Tools()
    meter: Meter | None = None
    recorder: CallRecorder | None = None  # of a durable run
    # records, just before a tool is called, that it will be; gets ToolSpec.digest
    intend: Callable[[str], None] | None = None
    is_model: bool = False  # it reads results itself: long ones come in parts
    trails: "tuple[AuditLog, ...]" = ()  # of the sandboxes whose programs made the call
    call: str = ""  # the identity of the call within the run
    privacy: "PrivacyScope | None" = None
    within: Span | None = None  # of the tool that makes the call

    @property
    def cause(self) -> str:
        """The span that causes the call, as text."""
        span = self.within
        return (span.traceparent or span.trace_id) if span else self.traceparent


Perform = Callable[[dict[str, Any], Caller], Any]


class Tool(NamedTuple):
    """A tool that can be called: `perform` executes one call, whose arguments were checked."""

    spec: "ToolSpec"
    perform: Perform


CALLING: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("calling", default=None)

"""`Caller`: on whose behalf a tool is called; `Tool`: a tool that can be called.

What a call executes in turn belongs to its caller: in the trail, in depth, and in what it may call.
"""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...policies.tools import Tools
from ...runner.messages import Answer, Call
from ..schemas.spec import ToolSpec
from .meter import Meter

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog


class PendingCall(Protocol):
    """One call that a run records; `call` is its identity within the run."""

    call: str

    def begin(self) -> None:
        """Record that the call is about to be made; raises RegistryError, and then it must not be."""


class CallRecorder(Protocol):
    """What answers the calls of a durable run (runs/recorder.py)."""

    @property
    def run(self) -> str:
        """The id of the run."""

    def answer(
        self, call: Call, arguments: dict[str, Any], anew: Callable[[Any], Answer],
        tell: Callable[[Answer], None], *, may_be_repeated: bool,
    ) -> None:  # fmt: skip
        """Pass the answer to `call` to `tell`: the recorded one, or the one that `anew` returns."""


class Caller(NamedTuple):
    """On whose behalf a tool is called.

    `id` is that of the execution or session, or the name of an agent; `traceparent` the span that
    causes the call; `depth` counts the tools between it and whoever began; `tools` are the only ones
    it may call, None is all; `rules` those of its policy; `meter` counts its calls.
    """

    id: str = ""
    traceparent: str = ""
    depth: int = 0
    tools: frozenset[str] | None = None
    rules: Tools = Tools()
    meter: Meter | None = None
    recorder: CallRecorder | None = None  # of a run that can wait
    intend: Callable[[], None] | None = None  # notes, before a tool is performed, that it will be
    is_model: bool = False  # reads results itself: long ones come in pages
    trails: "tuple[AuditLog, ...]" = ()  # of the sandboxes whose programs made the call
    call: str = ""  # the identity of the call within the run


Perform = Callable[[dict[str, Any], Caller], Any]


class Tool(NamedTuple):
    """A tool that can be called: `perform` does the work of one call, whose arguments were checked."""

    spec: ToolSpec
    perform: Perform


CALLING: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("calling", default=None)

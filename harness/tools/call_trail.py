"""Records of calls: that one is about to be made, what came of it, why it was refused."""

import hashlib
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from ...policies.errors import (
    ToolBudgetExceeded,
    ToolError,
    ToolFailed,
    ToolResultInvalid,
    ToolResultTooLarge,
)
from ...runner.audit.level import AuditLevel
from ...runner.audit.spans import Span
from .caller import Caller, Tool
from .filters import Hits

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog


class BrokerCall(NamedTuple):
    """A call on its way."""

    tool: Tool
    arguments: dict[str, Any]
    caller: Caller
    span: Span


OWN: Final = "own"
OwnTrail = Literal["own"]
_OWN_ENTRIES = 1000


class CallTrail:
    """Writes the records of one broker: into `audit`, and into the trails of the sandboxes whose
    programs call.

    With `OWN`, a call that comes from no sandbox with a trail is recorded in one in memory.
    """

    def __init__(self, audit: "AuditLog | OwnTrail | None") -> None:
        self._given = audit
        self._lock = threading.Lock()
        self._own: AuditLog | None = None

    @property
    def audit(self) -> "AuditLog | None":
        """The trail of calls that come from no sandbox."""
        if self._given != OWN:
            return self._given
        from ...runner.audit.log import AuditLog

        with self._lock:
            self._own = self._own or AuditLog(max_entries=_OWN_ENTRIES)
            return self._own

    def _trails(self, caller: Caller) -> "list[AuditLog]":
        """Return where a call is recorded, each trail once."""
        if caller.trails and self._given == OWN:
            return _each_once(caller.trails)
        audit = self.audit
        return _each_once((audit, *caller.trails) if audit else caller.trails)

    def approved(self, passing: BrokerCall, digest: str) -> None:
        self._note("approved", passing, digest=digest)

    def made(self, passing: BrokerCall) -> None:
        """Note that a call is about to be made: of its arguments the hash and the length, never the
        text, which may hold anything."""
        if self._trails(passing.caller):
            text = msgspec.json.encode(passing.arguments, order="deterministic")
            digest = hashlib.sha256(text).hexdigest()
            self._note("call", passing, arguments_sha256=digest, arguments_bytes=len(text))

    def returned(self, passing: BrokerCall, size: int, hits: Hits) -> None:
        """Note how long the result was, and of what was taken out of it the kinds and the counts."""
        self._note("returned", passing, result_bytes=size, **_filtered(hits))

    def _note(self, action: str, passing: BrokerCall, **details: Any) -> None:
        for trail in self._trails(passing.caller):
            trail.record(
                "tool", action, target=passing.tool.spec.name, span=passing.span,
                caller=passing.caller.id, depth=passing.caller.depth, **details,
            )  # fmt: skip

    def refused(self, name: str, caller: Caller, span: Span, error: ToolError, hits: Hits) -> None:
        """Note why a call was refused, or failed; of those beyond a budget the 1st, 2nd, 4th, 8th...:
        whoever calls on must not fill the trail."""
        beyond = isinstance(error, ToolBudgetExceeded)
        times = (
            error.times if isinstance(error, ToolBudgetExceeded) else 0
        )  # 0: not this caller's own
        if beyond and times & (times - 1):
            return
        refused = not isinstance(error, ToolFailed | ToolResultInvalid | ToolResultTooLarge)
        action = "refused" if refused else "failed"
        more: dict[str, Any] = {"times": times} if beyond and times else {}
        for trail in self._trails(caller):
            trail.record(
                "tool", "waiting" if error.kind == "paused" else action, target=name, span=span,
                allowed=not refused, level=AuditLevel.WARNING, caller=caller.id, kind=error.kind,
                why=error.what, **more, **_filtered(hits),
            )  # fmt: skip


def _each_once(trails: "Iterable[AuditLog]") -> "list[AuditLog]":
    return list({id(trail): trail for trail in trails}.values())


def _filtered(hits: Hits) -> dict[str, Any]:
    return {"filtered": [f"{kind}: {count}" for kind, count in hits.items()]} if hits else {}

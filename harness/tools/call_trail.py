"""`CallTrail`: the records of a broker's calls in the audit trails: made, returned, failed, refused."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from ...policies.errors import (
    ToolBudgetExceeded,
    ToolError,
    ToolFailed,
    ToolResultInvalid,
    ToolResultTooLarge,
)
from ...policies.tool_rules import Tools
from ...runner.audit.record import TEXT_LIMIT, RecordForm, Span
from ...runner.settings import AuditLevel
from ..privacy.outcomes import Restored
from .results import Hits
from .tool import Caller, Tool

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog


class ToolTerms(msgspec.Struct, frozen=True):
    """The terms of every call of one tool by callers under the same rules, computed once."""

    tool: Tool
    callers_rules: Tools
    rules: Tools  # rules of the broker and of the caller, joined
    is_own: bool  # the broker's own tool, to which no rule applies
    is_judged: bool  # True if rules decide about the call
    accepts: Callable[[object], bool]  # True only for valid arguments; False proves nothing
    returns: Callable[[object], bool]  # the same for results
    called: RecordForm
    returned: RecordForm


def forms_of(tool: str) -> tuple[RecordForm, RecordForm]:
    """Return the forms of the records that a call is about to be made, and that it returned."""
    common = ("caller", "depth")
    return (
        RecordForm("tool", "call", tool, (*common, "arguments_sha256", "arguments_bytes")),
        RecordForm("tool", "returned", tool, (*common, "result_bytes")),
    )


class BrokerCall(msgspec.Struct, frozen=True):
    """A call that the broker found the tool of, and checks or makes.

    `arguments` are those of the tool: `restored` tells which of them were tokens.
    """

    terms: ToolTerms
    arguments: dict[str, Any]
    caller: Caller
    span: Span
    trails: "Sequence[AuditLog]"  # trails that record the call
    restored: Restored | None = None  # values restored for a caller that gets tokens

    @property
    def tool(self) -> Tool:
        return self.terms.tool

    @property
    def written(self) -> dict[str, Any]:
        """The arguments as the caller wrote them.  Records are made of these alone: a hash of a value
        would betray it."""
        return self.restored.written if self.restored else self.arguments


OWN: Final = "own"
OwnTrail = Literal["own"]
_OWN_ENTRIES = 1000
_ID_CHARACTERS = TEXT_LIMIT + 1  # a record shows that the id of a caller was longer
_IN_ORDER = msgspec.json.Encoder(order="deterministic").encode


class CallTrail:
    """Writes the records of one broker into `audit` and into the trails of the calling sandboxes.

    With `OWN`, calls that no sandbox records go to a trail in memory.
    """

    def __init__(self, audit: "AuditLog | OwnTrail | None") -> None:
        self._given = audit
        self._lock = threading.Lock()
        self._own: AuditLog | None = None

    @property
    def given(self) -> "AuditLog | None":
        """The trail that it was made with; None for one of its own."""
        return None if self._given == OWN else self._given

    @property
    def audit(self) -> "AuditLog | None":
        """The trail of calls that no sandbox records."""
        if self._given != OWN:
            return self._given
        from ...runner.audit.log import AuditLog

        with self._lock:
            self._own = self._own or AuditLog(max_entries=_OWN_ENTRIES)
            return self._own

    def of(self, caller: Caller) -> "Sequence[AuditLog]":
        """Return the trails that record a call, each once."""
        given, trails = self._given, caller.trails
        if len(trails) == 1 and (given is None or given == OWN or given is trails[0]):
            return trails
        if trails and given == OWN:
            return _each_once(trails)
        audit = self.audit
        return _each_once((audit, *caller.trails) if audit else caller.trails)

    def record_approval(self, call: BrokerCall, digest: str) -> None:
        self._record("approved", call, digest=digest)

    def record_call(self, call: BrokerCall) -> None:
        """Record that a call is about to be made.

        Of the arguments it records hash and length, never the text, which may hold secrets.
        """
        if not call.trails:
            return
        text = _IN_ORDER(call.written if call.restored else call.arguments)
        digest = hashlib.sha256(text).hexdigest()
        if call.restored:
            self._record(
                "call", call, arguments_sha256=digest, arguments_bytes=len(text),
                **_restored(call.restored),
            )  # fmt: skip
            return
        caller = call.caller
        for trail in call.trails:
            trail.record_formed(
                call.terms.called, call.span,
                (caller.id[:_ID_CHARACTERS], caller.depth, digest, len(text)),
            )  # fmt: skip

    def record_result(self, call: BrokerCall, size: int, hits: Hits) -> None:
        """Record the length of the result, and how often each kind of content was filtered out."""
        if hits:
            self._record("returned", call, result_bytes=size, **_counted("filtered", hits))
            return
        caller = call.caller
        for trail in call.trails:
            trail.record_formed(
                call.terms.returned, call.span, (caller.id[:_ID_CHARACTERS], caller.depth, size)
            )

    def _record(self, action: str, call: BrokerCall, **details: Any) -> None:
        for trail in call.trails:
            trail.record(
                "tool", action, target=call.tool.spec.name, span=call.span,
                caller=call.caller.id, depth=call.caller.depth, **details,
            )  # fmt: skip

    def record_failure(
        self, name: str, caller: Caller, span: Span, error: ToolError, hits: Hits
    ) -> None:
        """Record why a call was refused or failed.

        Of calls beyond a budget it records the 1st, 2nd, 4th, 8th and so on: a caller that goes on
        must not fill the trail.
        """
        beyond = isinstance(error, ToolBudgetExceeded)
        times = (
            error.times if isinstance(error, ToolBudgetExceeded) else 0
        )  # 0 if the budget belongs to another caller
        if beyond and times & (times - 1):
            return
        refused = not isinstance(error, ToolFailed | ToolResultInvalid | ToolResultTooLarge)
        action = "refused" if refused else "failed"
        more: dict[str, Any] = {"times": times} if beyond and times else {}
        for trail in self.of(caller):
            trail.record(
                "tool", "waiting" if error.kind == "paused" else action, target=name, span=span,
                allowed=not refused, level=AuditLevel.WARNING, caller=caller.id, kind=error.kind,
                why=error.what, **more, **_counted("filtered", hits),
            )  # fmt: skip


def _restored(restored: Restored) -> dict[str, Any]:
    """Return how many tokens of each kind became values, and how many words only look like tokens."""
    unknown = {"unknown_tokens": restored.unknown} if restored.unknown else {}
    return _counted("restored", restored.counts) | unknown


def _each_once(trails: "Iterable[AuditLog]") -> "list[AuditLog]":
    return list({id(trail): trail for trail in trails}.values())


def _counted(field: str, hits: Hits) -> dict[str, Any]:
    return {field: [f"{kind}: {count}" for kind, count in hits.items()]} if hits else {}

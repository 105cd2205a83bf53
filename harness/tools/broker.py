"""`Broker`: the one path on the host that every call of a tool takes, whoever calls.

Its gates are the lines of `Broker._pass`, in order; none is skipped for any caller.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...policies.errors import (
    ApprovalRequired,
    ToolArgumentsInvalid,
    ToolBudgetExceeded,
    ToolDenied,
    ToolError,
    ToolResultTooLarge,
)
from ...policies.tools import ALLOWED, ToolDecision, Tools, judge, may_allow, strictest
from ...runner.audit.spans import Span, span_of
from ..schemas.spec import ToolOwner, ToolSpec
from ..schemas.validation import compile_schema
from ..search.model import Model, model_of
from .approval import ApprovalRequest, Approve, refuse_approval
from .call_trail import OWN, BrokerCall, CallTrail, OwnTrail
from .caller import CALLING, Caller, Tool
from .catalogue import Catalogue, catalogue_of
from .catalogue import Offer as Offer
from .discovery import Discovery
from .filters import Hits, ResultFilter
from .meter import Meter
from .results import READ_ALL, READ_RESULT, Results
from .sanitizer import SanitizedResult, Sanitizer
from .vault import Redaction, Vault

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog


class Broker:
    """Calls tools for programs in cells, for made tools and for the host.  Safe from many threads.

    `tools` is a catalogue, such as a ToolFactory or McpServers, or a sequence of tools and functions.
    `rules` hold for every caller, beside those of the caller's own policy.  `approve` is asked about
    calls that the rules, or the tool itself, want approved.  `filters` see every result, and the words
    of every error, before the caller does (filters.py).

    Every call of a program is recorded in the trail of its sandbox.  `audit` is a trail for all calls,
    those of the host included; the default is one in memory for calls that no sandbox records.  None
    is no trail of its own.  `model`, a folder with a sentence encoder, has programs find tools by
    meaning too (meaning.py).  Raises PolicyError for tools that it cannot call.
    """

    def __init__(
        self,
        tools: "Catalogue | Iterable[Tool | Callable[..., Any]]",
        *,
        rules: Tools = Tools(),  # noqa: B008 - a constant
        vault: Vault | None = None,
        approve: Approve = refuse_approval,
        audit: "AuditLog | OwnTrail | None" = OWN,
        filters: Sequence[ResultFilter] = (),
        model: "Model | str | os.PathLike[str] | None" = None,
    ) -> None:
        self.rules = rules
        self._tools = catalogue_of(tools)
        self._vault = vault or Vault()
        self._approve = approve
        self._trail = CallTrail(audit)
        self._sanitizer = Sanitizer(filters)
        self._results = Results()
        own = [
            Tool(READ_RESULT, self._read),
            Tool(READ_ALL, self._read_all),
            *Discovery(self._shown, model_of(model)).tools(),
        ]
        self._own = {tool.spec.name: tool for tool in own}
        self._host = Caller(id="host", meter=Meter(float("inf"), rules.calls_per_second))

    @property
    def audit(self) -> "AuditLog | None":
        """The trail of calls that come from no sandbox; None with `audit=None`."""
        return self._trail.audit

    def call(self, name: str, arguments: dict[str, Any], caller: Caller | None = None) -> Any:
        """Return what the tool gives; raises a ToolError that says at which gate the call ended."""
        return self._call(name, arguments, caller or CALLING.get() or self._host).value

    def try_out(self, tool: Tool, arguments: dict[str, Any], caller: Caller) -> Any:
        """Call a tool that need not be offered, through every gate but the one that finds it."""
        span = span_of(caller.traceparent)
        hits: Hits = {}
        try:
            return self._made(tool, arguments, caller, span, hits).value
        except ToolError as error:
            self._trail.refused(tool.spec.name, caller, span, error, hits)
            raise

    def call_for_json(self, name: str, arguments: dict[str, Any], caller: Caller) -> bytes:
        """Do the same, and return JSON."""
        return self._call(name, arguments, caller).data

    def refuse(self, name: str, caller: Caller, error: ToolError) -> ToolError:
        """Count and note a call that ended before it got here; return what to tell of it."""
        try:
            _count(caller)
        except ToolBudgetExceeded as exceeded:
            error = exceeded
        self._trail.refused(name, caller, span_of(caller.traceparent), error, {})
        return error

    def _call(self, name: str, arguments: dict[str, Any], caller: Caller) -> SanitizedResult:
        span = span_of(caller.traceparent)
        hits: Hits = {}
        try:
            return self._pass(name, arguments, caller, span, hits)
        except ToolError as error:
            self._trail.refused(name, caller, span, error, hits)
            raise

    def _pass(
        self, name: str, arguments: dict[str, Any], caller: Caller, span: Span, hits: Hits
    ) -> SanitizedResult:
        _count(caller)  # whatever becomes of it: or the trail could be filled with refusals
        return self._made(self._find(name, caller), arguments, caller, span, hits)

    def _made(
        self, tool: Tool, arguments: dict[str, Any], caller: Caller, span: Span, hits: Hits
    ) -> SanitizedResult:
        passing = BrokerCall(tool, arguments, caller, span)
        self._check_arguments(passing)
        verdict = self._judge(passing)
        self._ask(passing, verdict)
        secrets = self._credentials(tool.spec)
        redaction = Redaction(secrets.values()) if secrets else None
        self._trail.made(passing)
        if caller.intend:
            caller.intend()
        value = self._perform(passing, secrets, redaction, hits)
        rows = min(self.rules.result_rows, caller.rules.result_rows)
        returned = self._sanitizer.result(tool.spec, value, redaction, rows, hits)
        fitted = self._fit(passing, returned)
        self._trail.returned(passing, len(returned.data), hits)
        return fitted

    def explain(self, name: str, arguments: dict[str, Any], rules: Tools) -> list[str]:
        """Return what the rules say of a call, each that was looked at, without calling."""
        verdicts = [judge(self.rules, name, arguments), judge(rules, name, arguments)]
        return [line for verdict in verdicts for line in verdict.trace] + [
            f"{name}: {strictest(verdicts).effect}"
        ]

    def revision(self) -> int | None:
        """Return a number that changes when the tools change; None if the catalogue does not tell."""
        revision = getattr(self._tools, "revision", None)
        return revision() if revision else None

    def may_repeat(self, name: str) -> bool:
        """Tell whether a call whose outcome is unknown may be made again: a repetition does no harm, or
        the tool does not exist."""
        try:
            return self._tool(name).spec.may_be_repeated
        except ToolError:
            return True

    def specs(self, caller: Caller) -> Iterable[ToolSpec]:
        """Return the tools that are offered to `caller`, whatever the rules say."""
        return self._tools.specs() if caller.tools is None else self._named(caller.tools)

    def _shown(self, caller: Caller) -> list[ToolSpec]:
        return [spec for spec in self.specs(caller) if self.may_call(spec.name, caller)]

    def may_call(self, name: str, caller: Caller) -> bool:
        """Tell whether the rules let `caller` call a tool, with whatever arguments."""
        return may_allow(self.rules, name) and may_allow(caller.rules, name)

    def _named(self, names: Iterable[str]) -> list[ToolSpec]:
        """Return the specs of those of `names` that can be called."""
        found = []
        for name in sorted(names):
            with contextlib.suppress(ToolError):
                found.append(self._tools.get(name).spec)
        return found

    # the gates

    def _tool(self, name: str) -> Tool:
        return self._own[name] if name in self._own else self._tools.get(name)

    def _find(self, name: str, caller: Caller) -> Tool:
        tool = self._tool(name)
        if name in self._own:
            return tool
        if caller.tools is not None and tool.spec.name not in caller.tools:
            raise ToolDenied(f"{caller.id} may not call {name}", tool=name)
        if caller.depth >= min(self.rules.depth, caller.rules.depth):
            raise ToolDenied(
                f"{name}: {caller.depth} tools have called each other already, as many as tools.depth "
                "of the policy allows",
                tool=name,
            )
        return tool

    def _check_arguments(self, passing: BrokerCall) -> None:
        spec = passing.tool.spec
        if given := spec.credentials.keys() & passing.arguments.keys():
            names = ", ".join(sorted(given))
            raise ToolArgumentsInvalid(f"{names}: only the host gives that", tool=spec.name)
        if complaints := compile_schema(spec.parameters).complaints(passing.arguments):
            raise ToolArgumentsInvalid("; ".join(complaints), tool=spec.name)

    def _judge(self, passing: BrokerCall) -> ToolDecision:
        name = passing.tool.spec.name
        if name in self._own:
            return ALLOWED
        ours = judge(self.rules, name, passing.arguments)
        theirs = judge(passing.caller.rules, name, passing.arguments)
        verdict = ours if ours is theirs else strictest([ours, theirs])
        if verdict.effect == "deny":
            raise ToolDenied(f"{name}: {verdict.reason or 'a rule denies it'}", tool=name)
        return verdict

    def _ask(self, passing: BrokerCall, verdict: ToolDecision) -> None:
        spec, caller = passing.tool.spec, passing.caller
        if verdict.effect != "approve" and not spec.risky:
            return
        why = "the tool is risky" if spec.risky else "a rule wants it approved"
        run = caller.recorder.run if caller.recorder else ""
        asked = ApprovalRequest(
            spec.name, spec.description, passing.arguments, caller.id, verdict.reason or why, run,
            spec.identity, caller.call,
        )  # fmt: skip
        if self._approve(asked) is not True:
            raise ApprovalRequired(f"{spec.name} was not approved", tool=spec.name)
        self._trail.approved(passing, asked.digest)

    def _credentials(self, spec: ToolSpec) -> dict[str, str]:
        return {name: self._vault.get(key) for name, key in spec.credentials.items()}

    def _perform(
        self, passing: BrokerCall, secrets: dict[str, str], redaction: Redaction | None, hits: Hits
    ) -> Any:
        inner = _within(passing)
        token = CALLING.set(inner)
        try:
            return passing.tool.perform(passing.arguments | secrets, inner)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises
            told = self._sanitizer.error(passing.tool.spec, error, redaction, hits)
            raise told from told.__cause__
        finally:
            CALLING.reset(token)

    def _fit(self, passing: BrokerCall, returned: SanitizedResult) -> SanitizedResult:
        """Return a result that is not too long for its caller.

        A longer one is kept.  A model gets its head; for a program, which would take that for the
        result, ToolResultTooLarge is raised.
        """
        caller, spec = passing.caller, passing.tool.spec
        limit, size = self._limit(caller), len(returned.data)
        if size <= limit or spec is READ_ALL:
            return returned
        text = returned.data.decode()
        if caller.is_model:
            frame = self._results.fit(returned.value, text, int(limit), caller.id)
            return SanitizedResult(frame, msgspec.json.encode(frame))
        name = self._results.keep(text, caller.id)
        raise ToolResultTooLarge(
            f"{spec.name}: the result has {size} bytes, more than tools.result_bytes of the policy, "
            f"{limit:.0f}: "
            + (
                f"results.read_all({name!r}) gives it whole, results.read in parts"
                if name
                else "it is too long to be kept; ask for less"
            ),
            tool=spec.name, result_id=name,
        )  # fmt: skip

    def _limit(self, caller: Caller) -> float:
        """Return how many bytes of a result a caller gets at once."""
        most = min(self.rules.result_bytes, caller.rules.result_bytes)
        shown = min(self.rules.shown_bytes, caller.rules.shown_bytes)
        return min(most, shown) if caller.is_model else most

    def _read(self, arguments: dict[str, Any], caller: Caller) -> Any:
        return self._results.read(arguments, caller.id, int(self._limit(caller)))

    def _read_all(self, arguments: dict[str, Any], caller: Caller) -> Any:
        if caller.is_model:
            raise ToolArgumentsInvalid("results are read in parts here", "call results.read")
        return self._results.read_all(arguments, caller.id)


def _count(caller: Caller) -> None:
    if caller.meter:
        caller.meter.count()


def _within(passing: BrokerCall) -> Caller:
    """Return who calls while the tool works: who called it, one deeper."""
    caller, spec = passing.caller, passing.tool.spec
    made = spec.owner is ToolOwner.AGENT
    return caller._replace(
        depth=caller.depth + 1,
        recorder=None,  # what a tool calls is part of its answer, which is recorded as one
        intend=None,
        call="",
        is_model=caller.is_model and spec in (READ_RESULT, READ_ALL),  # which read for the caller
        traceparent=passing.span.traceparent or passing.span.trace_id,
        tools=frozenset(spec.calls) if made else caller.tools,
    )

"""`Broker`: the one path on the host that every call of a tool takes, from a cell or from the host.

Its gates are the lines of `Broker._call` and `Broker._made`, in order; no caller skips one.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ...policies import errors
from ...policies.argument_checks import did_you_mean
from ...policies.tool_rules import (
    ALLOWED,
    ToolDecision,
    ToolRule,
    Tools,
    judge,
    may_allow,
    narrow_tools,
    rule_lists,
    strictest,
)
from ...runner.audit.record import Span, span_of
from ..schemas.spec import ToolOwner, ToolSpec
from ..search.search import Model, model_of
from ..text.redaction import Redaction
from .approval import ApprovalRequest, Approve, refuse_approval
from .call_trail import OWN, BrokerCall, CallTrail, OwnTrail, ToolTerms, forms_of
from .catalogue import Catalogue, Discovery, catalogue_of
from .catalogue import Offer as Offer
from .results import READ_ALL, READ_RESULT, Hits, ResultFilter, Results
from .sanitizer import (
    PrivateResults,
    SanitizedResult,
    Sanitizer,
    check_arguments,
    private_error,
    quick_check_of,
    restored_of,
)
from .tool import CALLING, Caller, Meter, Tool, Vault

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog


_REMEMBERED = 1024  # tools, each with the rules of its callers


class Broker:
    """Calls tools for programs in cells, for made tools and for the host.  Safe from many threads.

    `tools` is a catalogue, such as a ToolFactory or McpServers, or a sequence of tools and functions.
    `rules` hold for every caller, in addition to those of the caller's own policy.  `approve` decides
    about each call for which a rule, or the tool itself, requires approval.  `filters` see every
    result, and the text of every error, before the caller does (results.py).

    Every call of a program is recorded in the trail of its sandbox.  `audit` is one more trail, for
    all calls including those of the host; by default the broker keeps one in memory for calls that no
    sandbox records, and with None it keeps none.  `model`, a folder with a sentence encoder, lets
    programs search tools by meaning too.  Raises PolicyError for tools that it cannot call.
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
        self._terms: dict[tuple[int, int], ToolTerms] = {}  # by the ids of tool and caller's rules
        self._tools = catalogue_of(tools)
        self._filters, self._model = filters, model_of(model)
        self._vault = vault or Vault()
        self._approve = approve
        self._trail = CallTrail(audit)
        self._sanitizer = Sanitizer(filters)
        self._results = Results()
        own = [
            Tool(READ_RESULT, self._read),
            Tool(READ_ALL, self._read_all),
            *Discovery(self._callable, self._model).tools(),
        ]
        self._own = {tool.spec.name: tool for tool in own}
        self._host = Caller(id="host", meter=Meter(float("inf"), rules.calls_per_second))

    @property
    def catalogue(self) -> Catalogue:
        """The tools that it calls, without its own."""
        return self._tools

    def extended(
        self, tools: Catalogue, *, rules: Tools, allowed: str, approve: Approve,
        vault: Vault | None = None,
    ) -> "Broker":  # fmt: skip
        """Return a broker of `tools` with the filters, trail, model and vault of this one, under its
        rules and `rules`; its own rules are not about the tools that the glob `allowed` matches.

        `approve` takes the place of the default.  Raises PolicyError if this broker has an approver,
        or both have a vault.
        """
        if self._approve is not refuse_approval:
            raise errors.PolicyError(
                "approve: the broker has an approver, and the agent's runs wait for a person",
                "leave approve= out; agent.calls has the approvals",
            )
        if self._vault and vault:
            raise errors.PolicyError(
                "vault: the broker has one already", "give all credentials in one"
            )
        first = ToolRule(allowed, "allow")
        lists = [(first, *each) for each in rule_lists(self.rules)]
        own = replace(self.rules, rules=lists[0] if lists else (), further=tuple(lists[1:]))
        return Broker(
            tools, rules=narrow_tools(own, rules), vault=self._vault or vault, approve=approve,
            audit=self._trail.given, filters=self._filters, model=self._model,
        )  # fmt: skip

    @property
    def audit(self) -> "AuditLog | None":
        """The trail of calls that come from no sandbox; None with `audit=None`."""
        return self._trail.audit

    def call(self, name: str, arguments: dict[str, Any], caller: Caller | None = None) -> Any:
        """Return the tool's result; raises a ToolError whose class tells which gate failed."""
        return self._call(name, arguments, caller or CALLING.get() or self._host).value

    def try_out(self, tool: Tool, arguments: dict[str, Any], caller: Caller) -> Any:
        """Call a tool that the catalogue need not have, through every other gate."""
        span = caller.within.child() if caller.within else span_of(caller.traceparent)
        hits: Hits = {}
        try:
            terms = self._terms_of(tool, caller.rules)
            return self._made(terms, arguments, caller, span, hits).value
        except errors.ToolError as error:
            private_error(caller.privacy, error, arguments)
            self._trail.record_failure(tool.spec.name, caller, span, error, hits)
            raise

    def call_for_json(self, name: str, arguments: dict[str, Any], caller: Caller) -> bytes:
        """Do what `call` does, and return the result as JSON."""
        return self._call(name, arguments, caller).data

    def refuse(self, name: str, caller: Caller, error: errors.ToolError) -> errors.ToolError:
        """Count and record a call that failed before it reached the broker.

        Return the error to pass on: `error`, or the one about an exhausted budget.
        """
        try:
            if caller.meter:
                caller.meter.count()
        except errors.ToolBudgetExceeded as exceeded:
            error = exceeded
        private_error(
            caller.privacy, error, [name, error.what]
        )  # judged only by what the caller wrote
        self._trail.record_failure(name, caller, span_of(caller.cause), error, {})
        return error

    def _call(self, name: str, arguments: dict[str, Any], caller: Caller) -> SanitizedResult:
        span = caller.within.child() if caller.within else span_of(caller.traceparent)
        hits: Hits = {}
        try:
            if caller.meter:  # first, so that refused calls count too and cannot fill the trail
                caller.meter.count()
            tool = self._own.get(name) or self._wanted(name, caller)
            terms = self._terms_of(tool, caller.rules)
            if caller.tools is not None or caller.depth >= terms.rules.depth:
                self._check_caller(terms, caller)
            return self._made(terms, arguments, caller, span, hits)
        except errors.ToolError as error:
            private_error(caller.privacy, error, [name, arguments])  # before it is recorded
            self._trail.record_failure(name, caller, span, error, hits)
            raise

    def _made(
        self, terms: ToolTerms, arguments: dict[str, Any], caller: Caller, span: Span, hits: Hits
    ) -> SanitizedResult:
        spec, rules = terms.tool.spec, terms.rules
        restored = restored_of(caller.privacy, spec, arguments) if caller.privacy else None
        given = restored.arguments if restored else arguments
        call = BrokerCall(terms, given, caller, span, self._trail.of(caller), restored)
        if spec.credentials or not terms.accepts(given):
            self._check_arguments(call)
        verdict = self._judge(call) if terms.is_judged else ALLOWED
        if verdict.effect == "approve" or spec.risky:
            self._ask(call, verdict)
        secrets = self._credentials(spec) if spec.credentials else {}
        redaction = Redaction(secrets.values()) if secrets else None
        self._trail.record_call(call)
        if caller.intend:
            caller.intend(spec.digest)
        private = None
        if caller.privacy and restored and spec is not READ_RESULT and spec is not READ_ALL:
            private = PrivateResults(caller.privacy, restored)
        value = self._perform(call, secrets, redaction, hits, private)
        returned = fitted = self._sanitizer.result(
            spec, value, redaction, rules.result_rows, hits, private, terms.returns
        )
        if len(returned.data) > rules.result_bytes or caller.is_model:
            fitted = self._fit(call, returned)
        self._trail.record_result(call, len(returned.data), hits)
        return fitted

    def explain(self, name: str, arguments: dict[str, Any], rules: Tools) -> list[str]:
        """Return each rule that was considered for a call, and the verdict, without calling."""
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
        except errors.ToolError:
            return True

    def has(self, name: str) -> bool:
        """Tell whether a tool of that name exists, whether or not the rules allow to call it."""
        try:
            self._tool(name)
        except errors.ToolError:
            return False
        return True

    def specs(self, caller: Caller) -> Iterable[ToolSpec]:
        """Return the tools that are offered to `caller`, including those that the rules deny."""
        return self._tools.specs() if caller.tools is None else self._named(caller.tools)

    def _callable(self, caller: Caller) -> list[ToolSpec]:
        return [spec for spec in self.specs(caller) if self.may_call(spec.name, caller)]

    def may_call(self, name: str, caller: Caller) -> bool:
        """Tell whether the rules allow `caller` to call a tool with some arguments."""
        return may_allow(self.rules, name) and may_allow(caller.rules, name)

    def _named(self, names: Iterable[str]) -> list[ToolSpec]:
        """Return the specs of the tools among `names` that exist and can be called."""
        found = []
        for name in sorted(names):
            with contextlib.suppress(errors.ToolError):
                found.append(self._tools.get(name).spec)
        return found

    def _terms_of(self, tool: Tool, rules: Tools) -> ToolTerms:
        key = id(tool), id(rules)
        known = self._terms.get(key)
        if known and known.tool is tool and known.callers_rules is rules:
            return known
        spec, joint = tool.spec, narrow_tools(self.rules, rules)
        is_own = spec.name in self._own
        terms = ToolTerms(
            tool, rules, joint, is_own, bool(joint.rules or joint.further) and not is_own,
            quick_check_of(spec.parameters), quick_check_of(spec.output_schema),
            *forms_of(spec.name),
        )  # fmt: skip
        if len(self._terms) >= _REMEMBERED:
            self._terms.clear()
        self._terms[key] = terms
        return terms

    # the gates

    def _tool(self, name: str) -> Tool:
        return self._own[name] if name in self._own else self._tools.get(name)

    def _wanted(self, name: str, caller: Caller) -> Tool:
        """Return a tool of the catalogue; the error suggests a tool that `caller` may call."""
        try:
            return self._tools.get(name)
        except errors.ToolNotFound as error:
            known = (spec.name for spec in self.specs(caller) if self.may_call(spec.name, caller))
            hint = did_you_mean(name, known, error.hint)
            raise errors.ToolNotFound(error.what, hint, tool=error.tool) from None

    def _check_caller(self, terms: ToolTerms, caller: Caller) -> None:
        name = terms.tool.spec.name
        if terms.is_own:
            return
        if caller.tools is not None and name not in caller.tools:
            raise errors.ToolDenied(f"{caller.id} may not call {name}", tool=name)
        if caller.depth >= terms.rules.depth:
            raise errors.ToolDenied(
                f"{name}: {caller.depth} tools have called each other already; tools.depth of the "
                "policy allows no more",
                tool=name,
            )

    def _check_arguments(self, call: BrokerCall) -> None:
        spec = call.tool.spec
        if spec.credentials and (given := spec.credentials.keys() & call.arguments.keys()):
            names = ", ".join(sorted(given))
            raise errors.ToolArgumentsInvalid(
                f"{names}: the host sets this argument; leave it out", tool=spec.name
            )
        check_arguments(spec, call.arguments)

    def _judge(self, call: BrokerCall) -> ToolDecision:
        name = call.tool.spec.name
        verdict = judge(call.terms.rules, name, call.arguments)
        if verdict.effect == "deny":
            raise errors.ToolDenied(f"{name}: {verdict.reason or 'a rule denies it'}", tool=name)
        return verdict

    def _ask(self, call: BrokerCall, verdict: ToolDecision) -> None:
        spec, caller = call.tool.spec, call.caller
        why = "the tool is risky" if spec.risky else "a rule requires approval"
        run = caller.recorder.run if caller.recorder else ""
        asked = ApprovalRequest(
            spec.name, spec.description, call.arguments, caller.id, verdict.reason or why, run,
            spec.identity, caller.call, call.written if call.restored else None,
        )  # fmt: skip
        if self._approve(asked) is not True:
            raise errors.ApprovalRequired(f"{spec.name} was not approved", tool=spec.name)
        self._trail.record_approval(call, asked.digest)

    def _credentials(self, spec: ToolSpec) -> dict[str, str]:
        return {name: self._vault.get(key) for name, key in spec.credentials.items()}

    def _perform(
        self, call: BrokerCall, secrets: dict[str, str], redaction: Redaction | None, hits: Hits,
        private: PrivateResults | None,
    ) -> Any:  # fmt: skip
        inner = _within(call)
        token = CALLING.set(inner)
        try:
            return call.terms.tool.perform(call.arguments | secrets, inner)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may raise anything
            told = self._sanitizer.error(call.tool.spec, error, redaction, hits, private)
            raise told from told.__cause__
        finally:
            CALLING.reset(token)

    def _fit(self, call: BrokerCall, returned: SanitizedResult) -> SanitizedResult:
        """Return the result, or a replacement if it is longer than its caller may get.

        A longer one is kept for `results.read`.  A model gets its head.  A program would take a head
        for the whole result, so it gets ToolResultTooLarge.
        """
        caller, spec = call.caller, call.tool.spec
        size = len(returned.data)
        limit = _limit(call.terms.rules, caller)
        if size <= limit or spec is READ_ALL:
            return returned
        text = returned.data.decode()
        if caller.is_model:
            frame = self._results.fit(returned.value, text, int(limit), caller.id)
            return SanitizedResult(frame, msgspec.json.encode(frame))
        name = self._results.keep(text, caller.id)
        raise errors.ToolResultTooLarge(
            f"{spec.name}: the result has {size} bytes, tools.result_bytes of the policy allows "
            f"{limit:.0f}: "
            + (
                f"results.read_all({name!r}) returns it whole, results.read in parts"
                if name
                else "it is too long to keep; ask for less"
            ),
            tool=spec.name, result_id=name,
        )  # fmt: skip

    def _read(self, arguments: dict[str, Any], caller: Caller) -> Any:
        limit = _limit(narrow_tools(self.rules, caller.rules), caller)
        return self._results.read(arguments, caller.id, int(limit))

    def _read_all(self, arguments: dict[str, Any], caller: Caller) -> Any:
        if caller.is_model:
            raise errors.ToolArgumentsInvalid(
                "a model reads long results in parts", "call results.read"
            )
        return self._results.read_all(arguments, caller.id)


def _limit(rules: Tools, caller: Caller) -> float:
    most = rules.result_bytes
    return min(most, rules.shown_bytes) if caller.is_model else most


def _within(call: BrokerCall) -> Caller:
    """Return the caller of the calls that this tool makes: the same, one level deeper."""
    caller, spec = call.caller, call.terms.tool.spec
    made = spec.owner is ToolOwner.AGENT
    # Without `recorder`, because the run records this tool's answer, which includes its own calls.
    return Caller(
        id=caller.id,
        within=call.span,
        depth=caller.depth + 1,
        tools=frozenset(spec.calls) if made else caller.tools,
        rules=caller.rules,
        meter=caller.meter,
        is_model=caller.is_model
        and spec in (READ_RESULT, READ_ALL),  # these two tools read results for the caller
        trails=caller.trails,
        privacy=caller.privacy,
    )

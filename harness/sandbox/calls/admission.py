"""`Admission`: checks each call of a sandbox, and records its start and its end in the trail."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict, replace

from ....policies.languages import PYTHON
from ....policies.languages.table import LanguageTable, language_table
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.policy import Policy, Validation
from ....policies.source.findings import Finding, Rules
from ....runner.cells.workspace import KeptWorkspace
from ....runner.messages import new_execution_id
from ....runner.requests.request import Request, Streams
from ....runner.requests.result import SandboxResult, SandboxStatus
from ..parameters import CallArguments, CommandArguments, ProgramArguments
from .call_request import Rejected, check_language, make_program, make_request

if TYPE_CHECKING:
    from contextvars import ContextVar

    from ....runner.audit.execution_trail import ExecutionTrail, RecordPlace
    from ....runner.requests.result import NetworkRecord
    from ...tools.tool import Caller
    from .private import OutputTokens, PrivateCalls
    from .sandbox_tools import SandboxTools

_FENCE = "```"
_INDENT = frozenset(" \t\r\n\f")


class AdmittedCall(msgspec.Struct, frozen=True):
    """A call that passed the checks, whose start the trail has.

    Its `request` is executed within `with call`, so that the trail also has a call that was lost; the
    caller then returns the result of `end`.
    """

    admission: "Admission"
    language: str
    request: Request
    session_id: str | None
    begun: "RecordPlace | None"
    findings: tuple[Finding, ...]
    notices: tuple[str, ...]
    output: "OutputTokens | None"  # hides personal data in the output, as it comes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.begun is not None:
            self.admission.lose(self, error)

    def end(self, result: SandboxResult) -> SandboxResult:
        """Record the program's end; return its result with the findings of the checks."""
        if self.output:
            self.output.finish()
        return self.admission.end(self, result)


def _as_given(given: CommandArguments) -> CommandArguments:
    return given


class Admission:
    """The checks and records of every call of one sandbox."""

    def __init__(
        self, policy: Policy, layers: tuple[str, ...], rules: Rules, trail: "ExecutionTrail | None",
        sandbox_tools: "SandboxTools | None" = None, private: "PrivateCalls | None" = None,
    ) -> None:  # fmt: skip
        self.policy = policy
        self._layers = layers
        self._rules = rules
        self._trail = trail
        self._sandbox_tools = sandbox_tools
        self._private = private
        # In an image: gives a command its user and directory.
        self.placed: Callable[[CommandArguments], CommandArguments] = _as_given
        self.languages: Callable[[], LanguageTable] = language_table
        # Called when a program fails.
        self.on_failure: Callable[[SandboxResult], None] | None = None

    def admit(
        self, given: CallArguments, session_id: str | None = None
    ) -> AdmittedCall | SandboxResult:
        """Check a call and record its start, or return the result of one that is rejected; with
        privacy, the program gets tokens."""
        output = None
        if self._private:
            given = self._private.given(given, session_id)
            if given.on_output:
                output = self._private.output(given.on_output, session_id)
                given = replace(given, on_output=output.feed)
        try:
            language = check_language(given.language, self.languages)
            request = make_request(given, self.policy.limits)
        except Rejected as refusal:
            return self._rejected(str(refusal), given.trace_id, session_id)
        notices: tuple[str, ...] = ()
        if language == PYTHON and (request.code[:1] in _INDENT or request.code.startswith(_FENCE)):
            request, notices = _unwrapped(request)
        mode = self.policy.validation.mode
        findings = () if mode == "off" else self._check(request.code, language, self._rules)
        if findings and mode == "enforce":
            rejected = self._rejected(str(findings[0]), request.trace_id, session_id, findings)
            return self._noticed(rejected, request, language, notices)
        return self._begin(request, language, session_id, findings, notices, output)

    def admit_program(
        self, given: ProgramArguments, environment: Mapping[str, str],
        on_streams: Callable[[Streams], None], cancel: int,
    ) -> AdmittedCall:  # fmt: skip
        """Check the request of `Sandbox.program` and record its start."""
        request = make_program(given, self.policy, environment, on_streams, cancel)
        return self._begin(request, "program", None, (), (), None)

    def _begin(
        self, request: Request, language: str, session_id: str | None,
        findings: tuple[Finding, ...], notices: tuple[str, ...], output: "OutputTokens | None",
    ) -> AdmittedCall:  # fmt: skip
        begun = None
        if self._trail is not None:
            caller = self._calling.get()
            trace_id = request.trace_id or (caller.cause if caller else None)
            about = {"session_id": session_id} if session_id else {}
            if request.program:  # never its arguments, which may be secrets
                about["program"] = request.program.frame.arguments[0]
            begun = self._trail.begin(
                request.code, language, request.execution_id, trace_id, **about
            )
        if (
            self._sandbox_tools and not request.program
        ):  # long-lived programs have no client for tools
            span = begun.span if begun else None
            request = self._sandbox_tools.prepare(request, language, span, session_id)
        return AdmittedCall(self, language, request, session_id, begun, findings, notices, output)

    def record_compiler(
        self, request: Request, language: str
    ) -> Callable[[SandboxResult], SandboxResult]:
        """Record the start of a compiler, and return the function that records its end."""
        if self._trail is None:
            return lambda result: result
        trail, trace_id = self._trail, request.trace_id
        begun = trail.begin(request.code, language, request.execution_id, trace_id)

        def end(result: SandboxResult) -> SandboxResult:
            trail.end(self._recordable(result, None), begun, in_session=False)
            return result

        return end

    @cached_property
    def _calling(self) -> "ContextVar[Caller | None]":
        from ...tools.tool import CALLING  # needed only with an audit trail

        return CALLING

    def lose(self, call: AdmittedCall, why: BaseException) -> None:
        """Record that the outcome of a call is unknown."""
        if self._trail and call.begun:
            self._trail.lose(call.request.execution_id, call.begun, why)

    def end(self, call: AdmittedCall, result: SandboxResult) -> SandboxResult:
        """Record the end of a call, and return its result with the findings of the checks."""
        if self._trail and call.begun:
            begun, in_session = call.begun, call.session_id is not None
            recorded = self._recordable(result, call.session_id)
            result = replace(
                result,
                trace_id=begun.span.trace_id,
                traceparent=begun.span.traceparent,
                audited=self._trail.end(recorded, begun, in_session=in_session),
            )
        if call.request.program:
            return result
        if result.status is not SandboxStatus.COMPLETED:
            if self.on_failure:
                self.on_failure(result)
            result = self._noticed(result, call.request, call.language, call.notices)
        elif call.notices:
            result = replace(result, notices=(*call.notices, *result.notices))
        if call.findings or call.session_id:
            result = replace(result, findings=call.findings, session_id=call.session_id)
        return self._private.result(result, call.session_id) if self._private else result

    def _noticed(
        self, result: SandboxResult, request: Request, language: str, notices: tuple[str, ...]
    ) -> SandboxResult:
        """Return the result of a failed program, with notices of lines that are not Python."""
        if language == PYTHON and _is_no_python(result):
            from .idioms import notices_of  # seldom needed

            notices += notices_of(request.code, self.policy)
        return replace(result, notices=(*notices, *result.notices)) if notices else result

    def with_tokens(
        self, given: CommandArguments, session_id: str | None = None
    ) -> CommandArguments:
        """Return the arguments of a command as cells take them: with privacy with tokens in place of
        values, in an image with its user and directory."""
        given = self.placed(given)
        return self._private.command(given, session_id) if self._private else given

    def check_tokens(self, files: Mapping[str, bytes], session_id: str) -> None:
        """Raise PolicyError if files that are to outlive a session hold its tokens for values."""
        if self._private:
            self._private.check_tokens(files, session_id)

    def continue_session(self, source: str, session_id: str) -> None:
        """Let a branch of a session know the tokens of personal data that its memory holds."""
        if self._private:
            self._private.continue_session(source, session_id)

    def without_tools(self) -> "Admission":
        """Return the same checks and records for programs that are offered no tools."""
        return Admission(self.policy, self._layers, self._rules, self._trail)

    def has_tool(self, name: str) -> bool:
        """Tell whether programs are offered a tool of that name."""
        return self._sandbox_tools is not None and self._sandbox_tools.broker.has(name)

    def record_session(self, session_id: str, action: str, why: str = "") -> None:
        """Record that a session was opened, or ended and why."""
        if self._trail:
            self._trail.note_session(session_id, action, why)

    def record_network(self, session_id: str, network: "NetworkRecord") -> None:
        """Record a session's use of the network after its last request."""
        if self._trail:
            self._trail.note_network(session_id, *network)

    def record_rule(self, rule: NetworkRule | NetworkDenial, has_effect: bool) -> None:
        """Record a network rule that is added; raises AuditError if it has no effect yet."""
        if self._trail:
            action = "allow" if isinstance(rule, NetworkRule) else "deny"
            about = {name: value for name, value in asdict(rule).items() if value is not None}
            self._trail.note_rule(action, str(rule), owed=has_effect, **about)

    def record_workspace(self, kept: KeptWorkspace | None, **about: str) -> None:
        """Record whether a workspace was saved; `about` identifies the call or session."""
        if self._trail and kept:
            self._trail.note_workspace(kept, **about)

    def check(self, code: str, language: str) -> tuple[Finding, ...]:
        """Return the findings of source checks, whatever the policy's validation mode."""
        return self._check(code, language, self._rules)

    @cached_property
    def _check(self) -> "Callable[[str, str, Rules], tuple[Finding, ...]]":
        from ....policies.source.check import check  # while the launcher starts, not before

        return check

    def _recordable(self, result: SandboxResult, session_id: str | None) -> SandboxResult:
        """Return a result whose violations and connections, which quote the program, have no values."""
        if self._private is None or not (result.violations or result.connections):
            return result
        return self._private.result(result, session_id).for_model()

    def _rejected(
        self, why: str, trace_id: str | None, session_id: str | None,
        findings: tuple[Finding, ...] = (),
    ) -> SandboxResult:  # fmt: skip
        result = SandboxResult(
            status=SandboxStatus.REJECTED,
            reason="validation",
            error=why,
            findings=findings,
            layers=self._layers,
            execution_id=new_execution_id(),
            trace_id=trace_id,
            session_id=session_id,
        )
        if self._trail:
            refused = self._trail.refuse(why, result.execution_id, trace_id)
            span = refused.span
            result = replace(
                result, trace_id=span.trace_id, traceparent=span.traceparent, audited=refused.kept
            )
        return self._private.result(result, session_id) if self._private else result


def _unwrapped(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return a Python request without the code fence around its program and without its indentation,
    and the notice about the fence."""
    from .idioms import without_fence, without_indent  # seldom needed

    code, notice = without_fence(request.code)
    code = without_indent(code)
    if code == request.code:
        return request, ()
    return replace(request, code=code), (notice,) if notice else ()


def _is_no_python(result: SandboxResult) -> bool:
    """Tell whether the program failed, or was rejected, because it could not be parsed."""
    if result.ok:
        return False
    is_found = any(each.rule == "syntax" for each in result.findings)
    return is_found or (result.error or "").startswith("SyntaxError")


def rules_of(validation: Validation) -> Rules:
    """Return the rules of source checks that a policy has."""
    return Rules(
        tuple(validation.blocked_imports), tuple(validation.allowed_imports),
        tuple(validation.blocked_builtins),
    )  # fmt: skip


def with_rules(policy: Policy, rules: Rules) -> Policy:
    """Return `policy` with other rules of source checks."""
    names = {name: getattr(rules, name) for name in Rules.__struct_fields__}
    return replace(policy, validation=replace(policy.validation, **names))

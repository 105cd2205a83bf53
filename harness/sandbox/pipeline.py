"""`RequestPipeline`: checks each request to a sandbox, executes it, and records both in the trail."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from ...policies.languages import PYTHON
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...policies.policy import Policy, Validation, check_names
from ...policies.source.findings import Finding, Rules
from ...runner.capture import OnOutput
from ...runner.request import Request, Streams, new_execution_id
from ...runner.result import SandboxResult, SandboxStatus
from ...runner.workspace import KeptWorkspace
from .parameters import CallArguments, CommandArguments, ProgramArguments
from .request import Rejected, check_language, make_program, make_request

if TYPE_CHECKING:
    from ...runner.audit.execution_trail import ExecutionTrail
    from ...runner.audit.spans import Span
    from ...runner.result import NetworkRecord
    from .private import PrivateCalls
    from .sandbox_tools import SandboxTools

_FENCE = "```"
_INDENT = frozenset(" \t\r\n\f")
Perform = Callable[[str, Request], SandboxResult]  # called with the language


class RequestPipeline:
    """The checks and records that every request to one sandbox passes."""

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
        self.on_failure: Callable[[SandboxResult], None] | None = None  # of a program

    def perform(
        self, given: CallArguments, perform: Perform, session_id: str | None = None
    ) -> SandboxResult:
        """Check a request, execute it by `perform`, and record both; with privacy, the program gets
        tokens."""
        if self._private is None:
            return self._performed(given, perform, session_id)
        result = self._performed(self._private.given(given, session_id), perform, session_id)
        return self._private.result(result, session_id)

    def with_tokens(
        self, given: CommandArguments, session_id: str | None = None
    ) -> CommandArguments:
        """Return the arguments of a command, with privacy with tokens in place of values."""
        return self._private.command(given, session_id) if self._private else given

    def check_tokens(self, files: Mapping[str, bytes], session_id: str) -> None:
        """Raise PolicyError if files that are to outlive a session hold its tokens for values."""
        if self._private:
            self._private.check_tokens(files, session_id)

    def continue_session(self, source: str, session_id: str) -> None:
        """Let a branch of a session know the tokens of personal data that its memory holds."""
        if self._private:
            self._private.continue_session(source, session_id)

    def streamed(
        self, on_output: OnOutput | None, session_id: str | None = None
    ) -> AbstractContextManager[OnOutput | None]:
        """Return the listener for output during a block; with privacy, it hears tokens."""
        if self._private is None:
            return nullcontext(on_output)
        from .private import streamed

        return streamed(on_output, self._private.scope(session_id))

    def _performed(
        self, given: CallArguments, perform: Perform, session_id: str | None
    ) -> SandboxResult:
        try:
            language = check_language(given.language)
            request, notices = _unwrapped(make_request(given, self.policy.limits), language)
        except Rejected as refusal:
            return self._rejected(str(refusal), given.trace_id)
        findings = self._findings(request.code, language)
        if findings and self.policy.validation.mode == "enforce":
            result = self._rejected(str(findings[0]), request.trace_id, findings)
        else:
            result = self._recorded(request, language, perform, session_id)
            if self.on_failure and not result.ok:
                self.on_failure(result)
        if language == PYTHON and _is_no_python(result):
            from .idioms import notices_of  # seldom needed

            notices += notices_of(request.code, self.policy)
        if findings or session_id or notices:
            return replace(
                result,
                findings=findings,
                session_id=session_id,
                notices=(*notices, *result.notices),
            )
        return result

    def without_tools(self) -> "RequestPipeline":
        """Return the same checks and records for programs that are offered no tools."""
        return RequestPipeline(self.policy, self._layers, self._rules, self._trail)

    def perform_program(
        self, given: ProgramArguments, environment: Mapping[str, str],
        on_streams: Callable[[Streams], None], perform: Callable[[Request], SandboxResult],
    ) -> SandboxResult:  # fmt: skip
        """Check the request of `Sandbox.program`, execute it by `perform`, and record both."""
        request = make_program(given, self.policy, environment, on_streams)
        return self._recorded(request, "program", lambda _, request: perform(request), None)

    def has_tool(self, name: str) -> bool:
        """Tell whether programs are offered a tool of that name."""
        return self._sandbox_tools is not None and self._sandbox_tools.broker.has(name)

    def record_session(self, session_id: str, action: str, why: str = "") -> None:
        """Record that a session was opened, or ended and why."""
        if self._trail:
            self._trail.note_session(session_id, action, why)

    def record_network(self, session_id: str, network: "NetworkRecord") -> None:
        """Record what a session did with the network after its last request."""
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
        from ...policies.source.check import check  # while the launcher starts, not before

        return check

    def _findings(self, code: str, language: str) -> tuple[Finding, ...]:
        return () if self.policy.validation.mode == "off" else self.check(code, language)

    def _recorded(
        self, request: Request, language: str, perform: Perform, session_id: str | None
    ) -> SandboxResult:
        if self._trail is None:
            return perform(language, self._with_tools(request, language, None, session_id))
        from ..tools.caller import CALLING  # not without an audit trail

        about = _about(request, session_id)
        caller = CALLING.get()
        trace_id = request.trace_id or (caller.cause if caller else None)
        begun = self._trail.begin(request.code, language, request.execution_id, trace_id, **about)
        try:
            given = self._with_tools(request, language, begun.span, session_id)
            result = perform(language, given)
        except BaseException as error:
            self._trail.lose(request.execution_id, begun, error)
            raise
        return replace(
            result,
            trace_id=begun.span.trace_id,
            traceparent=begun.span.traceparent,
            audited=self._trail.end(
                self._recordable(result, session_id), begun, in_session=session_id is not None
            ),
        )

    def _recordable(self, result: SandboxResult, session_id: str | None) -> SandboxResult:
        """Return a result whose violations and connections, which quote the program, have no values."""
        if self._private is None or not (result.violations or result.connections):
            return result
        return self._private.result(result, session_id).for_model()

    def _with_tools(
        self, request: Request, language: str, span: "Span | None", session_id: str | None
    ) -> Request:
        if self._sandbox_tools is None or request.program:  # such a program has no client for tools
            return request
        return self._sandbox_tools.prepare(request, language, span, session_id)

    def _rejected(
        self, why: str, trace_id: str | None, findings: tuple[Finding, ...] = ()
    ) -> SandboxResult:
        result = SandboxResult(
            status=SandboxStatus.REJECTED,
            reason="validation",
            error=why,
            findings=findings,
            layers=self._layers,
            execution_id=new_execution_id(),
            trace_id=trace_id,
        )
        if self._trail is None:
            return result
        refused = self._trail.refuse(why, result.execution_id, trace_id)
        return replace(
            result, trace_id=refused.span.trace_id, traceparent=refused.span.traceparent,
            audited=refused.kept,
        )  # fmt: skip


def _unwrapped(request: Request, language: str) -> tuple[Request, tuple[str, ...]]:
    """Return a request without the code fence around its program and without its indentation, and the
    notice about the fence."""
    code = request.code
    if language != PYTHON or not (code[:1] in _INDENT or code.startswith(_FENCE)):
        return request, ()
    from .idioms import without_fence, without_indent  # seldom needed

    code, notice = without_fence(code)
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


def _about(request: Request, session_id: str | None) -> dict[str, str]:
    """Return more fields for the record of the start; never an argument, which may be a secret."""
    program = {"program": request.program.frame.arguments[0]} if request.program else {}
    return program | ({"session_id": session_id} if session_id else {})


def rules_of(
    validation: Validation, imports: Sequence[str] | None, builtins: Sequence[str] | None
) -> Rules:
    """Return the rules of source checks: the given lists, else those of the policy."""

    def names(where: str, given: Sequence[str] | None, policys: Sequence[str]) -> tuple[str, ...]:
        return check_names(where, policys if given is None else given)

    return Rules(
        names("blocked_imports", imports, validation.blocked_imports),
        tuple(validation.allowed_imports),
        names("blocked_builtins", builtins, validation.blocked_builtins),
    )

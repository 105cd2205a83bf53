"""Personal data in the calls of a sandbox: inputs of programs, and results for a model."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from ....policies.errors import PolicyError
from ....policies.policy import Policy
from ....runner.requests.request import OnOutput
from ....runner.requests.result import SandboxResult
from ...privacy.naming import HOST, PROGRAM, tokens_in
from ...privacy.privacy import CallInputs, Privacy
from ...privacy.scope import PrivacyScope
from ...privacy.streams import StreamGuard
from ..parameters import CallArguments, CommandArguments
from .call_request import CommandResult

# Fields with text of cellwright, which can look like personal numbers.
_OURS = frozenset(
    {"status", "reason", "layers", "execution_id", "trace_id", "traceparent", "session_id"}
)


class PrivateResult(SandboxResult, frozen=True, kw_only=True):
    """A result of a sandbox with privacy: for the host as the program left it, and `for_model`."""

    scope: Any  # a PrivacyScope; typed Any because msgspec cannot encode it

    def for_model(self) -> SandboxResult:
        shown = {name: getattr(self, name) for name in SandboxResult.__struct_fields__}
        return SandboxResult(**{
            name: value if name in _OURS else model_view(value, self.scope)
            for name, value in shown.items()
        })  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in SandboxResult.__struct_fields__}
        return SandboxResult(**plain).to_dict()


class PrivateCommandResult(CommandResult, frozen=True, kw_only=True):
    """A result of a command in a sandbox with privacy."""

    scope: Any

    def for_model(self) -> CommandResult:
        shown = {name: getattr(self, name) for name in CommandResult.__struct_fields__}
        return CommandResult(**{
            name: value if name in _OURS else model_view(value, self.scope)
            for name, value in shown.items()
        })  # fmt: skip


def private_outcome(outcome: CommandResult, result: SandboxResult) -> CommandResult:
    """Return the outcome of a command with the scope of its result, if that has one."""
    if not isinstance(result, PrivateResult):
        return outcome
    fields = {name: getattr(outcome, name) for name in CommandResult.__struct_fields__}
    return PrivateCommandResult(**fields, scope=result.scope)


def model_view(value: Any, scope: PrivacyScope) -> Any:
    """Return a part of a result with tokens in place of values: every text, and files of text."""
    if isinstance(value, str):
        return scope.text(value, PROGRAM)
    if isinstance(value, bytes):
        return scope.content(value, PROGRAM)
    if isinstance(value, tuple):
        return tuple(model_view(each, scope) for each in value)
    if isinstance(value, dict | list):
        return scope.json(value, naming=PROGRAM).value
    if isinstance(value, msgspec.Struct):
        return replace(value, **{
            name: model_view(getattr(value, name), scope) for name in value.__struct_fields__
        })  # fmt: skip
    return scope.json(value, naming=PROGRAM).value if isinstance(value, int | float) else value


class PrivateCalls:
    """The privacy of one sandbox, applied to its calls; `of` names a client with its own values,
    whose inputs a model writes."""

    def __init__(self, privacy: Privacy, of: str = "") -> None:
        self.privacy = privacy
        self.of = of

    def scope(self, session_id: str | None) -> PrivacyScope:
        """Return the scope of a session, or of the calls without one."""
        return self.privacy.scope(session_id or "", of=self.of)

    def given(self, given: CallArguments, session_id: str | None) -> CallArguments:
        """Return the arguments of a call as a program gets them; raises PolicyError for content that
        cannot be replaced."""
        data = CallInputs(given.inputs, given.files, given.stdin, given.env, tuple(given.arguments))
        made = self.privacy.inputs(data, self.scope(session_id), PROGRAM if self.of else HOST)
        return given if made is data else replace(given, **made._asdict())

    def command(self, given: CommandArguments, session_id: str | None) -> CommandArguments:
        """Do what `given` does, with the arguments of a command."""
        argv = (given.command,) if isinstance(given.command, str) else tuple(given.command)
        data = CallInputs(None, None, given.stdin, given.env, argv)
        made = self.privacy.inputs(data, self.scope(session_id), PROGRAM if self.of else HOST)
        if made is data:
            return given
        command = made.arguments[0] if isinstance(given.command, str) else made.arguments
        return replace(given, command=command, stdin=made.stdin, env=made.env)

    def output(self, on_output: OnOutput, session_id: str | None) -> "OutputTokens":
        """Return a function that passes output on to a listener, with tokens in place of values."""
        return OutputTokens(on_output, self.scope(session_id))

    def result(self, result: SandboxResult, session_id: str | None) -> PrivateResult:
        fields = {name: getattr(result, name) for name in SandboxResult.__struct_fields__}
        return PrivateResult(**fields, scope=self.scope(session_id))

    def continue_session(self, source: str, session_id: str) -> None:
        """Let a branch of a session begin with the values of that, under their tokens."""
        self.privacy.continue_scope(source, session_id, of=self.of)

    def check_tokens(self, files: Mapping[str, bytes], session_id: str) -> None:
        """Raise PolicyError if a file holds a token: it means nothing to other sessions and hosts."""
        scope = self.scope(session_id)
        for path, content in files.items():
            text = content.decode("utf-8", "replace")
            if any(scope.value(each.token) for each in tokens_in(text)):
                raise PolicyError(
                    f"files: {path!a} has a token for personal data, which means nothing elsewhere",
                    "pass it as an argument",
                )

    def workspace(
        self, files: Mapping[str, bytes], session_id: str | None
    ) -> dict[str, tuple[str, bytes]]:
        """Return the files of a named workspace as programs see them, each with its path there:
        other programs may have written them.

        Raises PolicyError for content that cannot be replaced, as for the files of a call.
        """
        scope, made = self.scope(session_id), {}
        for path, content in files.items():
            data = CallInputs(None, {path: content}, None, None, ())
            (each,) = (self.privacy.inputs(data, scope, PROGRAM).files or {}).items()
            made[path] = each
        if len(dict(made.values())) < len(files):
            raise PolicyError("workspace: two paths differ in the writing of personal data alone")
        return made


class OutputTokens:
    """Passes output on with tokens in place of values: as it comes, and the rest at the end."""

    def __init__(self, on_output: OnOutput, scope: PrivacyScope) -> None:
        self._on_output = on_output
        self._scope = scope
        self._guards: dict[str, StreamGuard] = {}

    def feed(self, stream: str, data: bytes) -> None:
        """Take a piece of the output of a program."""
        if stream not in self._guards:
            self._guards[stream] = StreamGuard(self._scope)
        if ready := self._guards[stream].feed(data):
            self._on_output(stream, ready)

    def finish(self) -> None:
        """Pass on text that was held back as the possible beginning of a value."""
        for stream, guard in self._guards.items():
            if rest := guard.finish():
                self._on_output(stream, rest)


def private_calls(given: object, policy: Policy) -> PrivateCalls:
    """Return the privacy that the argument `privacy` of a sandbox and its policy ask for."""
    if not isinstance(given, Privacy | None):
        raise PolicyError(f"privacy: must be a Privacy, got {given!r}")
    return PrivateCalls(given.within(policy.privacy) if given else Privacy(rules=policy.privacy))

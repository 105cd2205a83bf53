"""Personal data in the calls of a sandbox: what programs get, and what a model may see of a result."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.capture import OnOutput
from ...runner.result import SandboxResult
from ..privacy.inputs import CallInputs
from ..privacy.naming import HOST, PROGRAM
from ..privacy.privacy import Privacy
from ..privacy.scope import PrivacyScope
from ..privacy.streams import StreamGuard
from ..privacy.tokens import tokens_in
from .command_result import CommandResult
from .parameters import CallArguments, CommandArguments

# Fields whose text is ours, and can look like a number of some kind.
_OURS = frozenset(
    {"status", "reason", "layers", "execution_id", "trace_id", "traceparent", "session_id"}
)


class PrivateResult(SandboxResult, frozen=True, kw_only=True):
    """A result of a sandbox with privacy: for the host as the program left it, and `for_model`."""

    scope: Any  # PrivacyScope, which no encoder knows

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
    """What the privacy of one sandbox does with its calls; `of` names a client with its own values,
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


@contextlib.contextmanager
def streamed(on_output: OnOutput | None, scope: PrivacyScope | None) -> Iterator[OnOutput | None]:
    """Give a listener that passes output on with tokens in place of values, the rest at the end."""
    if on_output is None or scope is None:
        yield on_output
        return
    guards: dict[str, StreamGuard] = {}
    told: Callable[[str, bytes], None] = on_output

    def pass_on(stream: str, data: bytes) -> None:
        if stream not in guards:
            guards[stream] = StreamGuard(scope)
        if ready := guards[stream].feed(data):
            told(stream, ready)

    yield pass_on
    for stream, guard in guards.items():
        if rest := guard.finish():
            told(stream, rest)


def private_calls(given: object, policy: Policy) -> PrivateCalls:
    """Return what the argument `privacy` of a sandbox and its policy ask for."""
    if not isinstance(given, Privacy | None):
        raise PolicyError(f"privacy: must be a Privacy, got {given!r}")
    return PrivateCalls(given.within(policy.privacy) if given else Privacy(rules=policy.privacy))

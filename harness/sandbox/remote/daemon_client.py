"""Cells of a daemon, for a `Sandbox(connect=path)`: the client side of the daemon's socket."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ....policies.errors import PolicyError
from ....policies.plan import Plan
from ....runner.requests.result import SandboxResult
from ..parameters import (
    CallArguments,
    CompileArguments,
    SessionArguments,
)
from ..sandbox_arguments import FewerCalls
from . import frames
from .call_frames import requirements_of, token_of
from .connections import Requests, daemon_connections

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ....runner.supervisor import SupervisorsState
    from ..judging.judge import Submission
    from ..judging.verdicts import Case, Judgement
    from ..languages.compiled import Build
    from ..sandbox_arguments import PolicyLike
    from ..sessions.session import Session


_HINTS = {
    "network": "the owner of the daemon decides on the network rules of its policies",
    "program": "make a Sandbox without connect=",
}


class DaemonsCells(FewerCalls):
    """Cells of the daemon that listens at `path`, under its policy of that name."""

    audit: "AuditLog | None" = None  # the daemon keeps the trail

    def __init__(self, path: str, policy: "PolicyLike | None") -> None:
        if not isinstance(policy, str | None):
            raise PolicyError(
                f"policy: must name a policy of the daemon with connect=, got {policy!r}"
            )
        self._requests = Requests(daemon_connections(path, policy or ""))
        try:
            described = self._requests.ask(frames.Describe(), frames.Description)
        except BaseException:
            self.close()
            raise
        self.policy = described.policy
        self.plan: Plan = described.plan

    def refuse(self, what: str) -> NoReturn:
        raise PolicyError(f"{what}: not available with connect=", _HINTS.get(what, ""))

    def execute(self, given: CallArguments) -> SandboxResult:
        _refuse_local(given)
        return self._requests.execute(given, self.policy.limits)

    def compile(self, given: CompileArguments) -> "Build":
        from .judge_frames import build_of, packed_compile  # seldom needed

        request = packed_compile(given)
        return build_of(given, self._requests.ask(request, frames.Compiled, cancel=given.cancel))

    def judge(self, given: "Submission", cases: "Sequence[Case]") -> "Judgement":
        """Have the daemon judge a program."""
        from .judge_frames import packed_judging  # seldom needed

        request = packed_judging(given, cases)
        return self._requests.ask(request, frames.Judged, cancel=given.cancel).judgement

    def session(self, given: SessionArguments) -> "Session":
        # A command that runs one program opens no session.
        from .attached_session import AttachedSession

        _refuse_local(given)
        packages = requirements_of(given.packages)
        opened = self._requests.ask(
            frames.OpenSession(given.id, given.language, packages), frames.Opened
        )
        return AttachedSession(self._requests, opened, self.policy.limits)

    def resume(self, token: str) -> "Session":
        # A command that runs one program resumes no session.
        from .attached_session import AttachedSession

        opened = self._requests.ask(frames.ResumeSession(token_of(token)), frames.Opened)
        return AttachedSession(self._requests, opened, self.policy.limits)

    def discard(self, token: str) -> None:
        self._requests.ask(frames.DiscardPaused(token_of(token)), frames.Done)

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        judged = self._requests.ask(
            frames.Validate(code.encode(errors="surrogatepass")), frames.Validated
        )
        return judged.passes, judged.finding

    def state(self) -> "SupervisorsState":
        raise PolicyError("state: these are the cells of a daemon", 'ask it: "cellwright status"')

    def settle(self) -> None:
        self._requests.ask(frames.AwaitSettled(), frames.Done)

    def close(self) -> None:
        self._requests.pool.close()


def _refuse_local(given: CallArguments | SessionArguments) -> None:
    if given.workspace is not None or given.clean:
        raise PolicyError(
            "workspace: not available with connect=",
            "move files with snapshot() and restore() of a session",
        )

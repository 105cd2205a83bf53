"""Cells of a daemon, for a `Sandbox(connect=path)`: the client side of the daemon's socket."""

from typing import TYPE_CHECKING, TypeVar

import msgspec

from ....policies.errors import ClosedError, InternalError, LaunchError, PolicyError, SessionLost
from ....policies.plan import Plan
from ....policies.policy import Limits
from ....runner.capture import OnOutput
from ....runner.execution import NEVER
from ....runner.result import SandboxResult
from ....runner.workspace import WorkspaceFile
from ..parameters import CallArguments, ProgramArguments, SessionArguments
from ..program import Program
from ..session import Session, own
from ..workspaces.store import Workspaces
from .arguments import packed, result_of
from .connections import ConnectionPool
from .frames import (
    AwaitSettled,
    CheckSession,
    CloseSession,
    Content,
    Describe,
    Description,
    Done,
    Download,
    Executed,
    Files,
    ForkSession,
    ListSessionFiles,
    LostReason,
    Opened,
    OpenSession,
    TakeSnapshot,
    Validate,
    Validated,
)

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ..local import PolicyLike

_R = TypeVar("_R", bound=msgspec.Struct)


class DaemonsCells:
    """Cells of the daemon that listens at `path`, under its policy of that name."""

    audit: "AuditLog | None" = None  # the daemon keeps the trail

    def __init__(self, path: str, policy: "PolicyLike | None") -> None:
        if not isinstance(policy, str | None):
            raise PolicyError(
                f"policy: must name a policy of the daemon with connect=, got {policy!r}"
            )
        self._requests = _Requests(ConnectionPool(path, policy or ""))
        try:
            described = self._requests.ask(Describe(), Description)
        except BaseException:
            self.close()
            raise
        self.policy = described.policy
        self.plan: Plan = described.plan

    @property
    def workspaces(self) -> Workspaces:
        raise PolicyError("workspaces: not available with connect=")

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        _refuse_workspace(given)
        return self._requests.execute(given, on_output, cancel, self.policy.limits)

    def program(self, given: ProgramArguments) -> Program:
        raise PolicyError(
            "program: not available with connect=",
            "make a Sandbox without connect=",
        )

    def session(self, given: SessionArguments) -> Session:
        _refuse_workspace(given)
        opened = self._requests.ask(OpenSession(given.id, given.language), Opened)
        return AttachedSession(self._requests, opened, self.policy.limits)

    def has_tool(self, name: str) -> bool:
        return False  # the daemon does not tell, and records no runs

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        judged = self._requests.ask(Validate(code.encode(errors="surrogatepass")), Validated)
        return judged.passes, judged.finding

    def settle(self) -> None:
        self._requests.ask(AwaitSettled(), Done)

    def close(self) -> None:
        self._requests.pool.close()


def _refuse_workspace(given: CallArguments | SessionArguments) -> None:
    if given.workspace is not None or given.clean:
        raise PolicyError(
            "workspace: not available with connect=",
            "move files with snapshot() and restore() of a session",
        )


class AttachedSession(Session):
    """A session whose cell is a daemon's; it outlives this process unless it is closed."""

    def __init__(self, requests: "_Requests", opened: Opened, limits: Limits) -> None:
        self.id = opened.id
        self.diverged = opened.diverged
        self._requests = requests
        self._key = opened.session
        self._language = opened.language
        self._limits = limits
        self._lost = ""

    @property
    def language(self) -> str:
        return self._language

    @property
    def lost(self) -> str:
        try:
            self._lost = self._lost or self._requests.ask(CheckSession(self._key), LostReason).lost
        except (ClosedError, LaunchError) as error:  # the session has ended, or cannot be reached
            return error.what
        return self._lost

    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        return self._requests.execute(own(given), on_output, cancel, self._limits, self._key)

    def download(self, path: str) -> bytes:
        return self._requests.ask(Download(self._key, path), Content).data

    def files(self) -> tuple[WorkspaceFile, ...]:
        return self._requests.ask(ListSessionFiles(self._key), Files).files

    def snapshot(self) -> bytes:
        return self._requests.ask(TakeSnapshot(self._key), Content).data

    def fork(self) -> Session:
        opened = self._requests.ask(ForkSession(self._key), Opened)
        return AttachedSession(self._requests, opened, self._limits)

    def close(self) -> None:
        """End the session for every client attached to it; harmless if it or the daemon has ended."""
        self._close_aexecutor()
        try:
            self._requests.ask(CloseSession(self._key), Done)
        except (ClosedError, LaunchError, SessionLost):
            return


class _Requests:
    """Sends requests and checks the type of each reply."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        reply = self.pool.ask(request, on_output, cancel)
        if not isinstance(reply, kind):
            raise InternalError(f"the daemon answered with {type(reply).__name__}")
        return reply

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int, limits: Limits,
        session: str = "",
    ) -> SandboxResult:  # fmt: skip
        request = packed(given, limits, session, stream=on_output is not None)
        return result_of(self.ask(request, Executed, on_output, cancel))

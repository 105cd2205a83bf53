"""Cells of a daemon, for a `Sandbox(connect=path)`: the client side of the daemon's socket."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ....policies.errors import ClosedError, InternalError, LaunchError, PolicyError, SessionLost
from ....policies.plan import Plan
from ....policies.policy import Limits
from ....runner.capture import OnOutput
from ....runner.execution import NEVER
from ....runner.result import SandboxResult
from ....runner.workspace import WorkspaceFile
from ..local import PolicyLike
from ..program import Program
from ..request import CallArguments
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
    SessionArguments,
    TakeSnapshot,
    Validate,
    Validated,
)

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog

_R = TypeVar("_R", bound=msgspec.Struct)


class DaemonsCells:
    """Cells of the daemon that listens at `path`, under its policy of that name."""

    audit: "AuditLog | None" = None  # the daemon keeps the trail

    def __init__(self, path: str | os.PathLike[str], policy: PolicyLike | None) -> None:
        if not isinstance(policy, str | None):
            raise PolicyError(
                f"policy: must name a policy of the daemon with connect=, got {policy!r}"
            )
        self._requests = _Requests(ConnectionPool(os.fspath(path), policy or ""))
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
        self, code: str | bytes, language: str, on_output: OnOutput | None, cancel: int,
        given: CallArguments,
    ) -> SandboxResult:  # fmt: skip
        _refuse_workspace(given.workspace, given.clean)
        requests, limits = self._requests, self.policy.limits
        return requests.execute(code, language, on_output, cancel, given, limits)

    def program(self, argv: Sequence[str], given: dict[str, Any]) -> Program:
        raise PolicyError(
            "program: not available with connect=",
            "make a Sandbox without connect=",
        )

    def session(self, id: str | None, language: str, workspace: str | None, clean: bool) -> Session:
        _refuse_workspace(workspace, clean)
        opened = self._requests.ask(OpenSession(id, SessionArguments(language=language)), Opened)
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


def _refuse_workspace(name: str | None, clean: bool) -> None:
    if name is not None or clean:
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
        self, code: str | bytes, language: str, given: CallArguments, on_output: OnOutput | None,
        cancel: int,
    ) -> SandboxResult:  # fmt: skip
        return self._requests.execute(
            code, language, on_output, cancel, own(given), self._limits, self._key
        )

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
        self, code: str | bytes, language: str, on_output: OnOutput | None, cancel: int,
        given: CallArguments, limits: Limits, session: str = "",
    ) -> SandboxResult:  # fmt: skip
        stream = on_output is not None
        request = packed(code, language, given, limits, session, stream=stream)
        return result_of(self.ask(request, Executed, on_output, cancel))

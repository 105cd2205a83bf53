"""What stands behind a `Sandbox` that connects: the cells of a daemon, over its socket."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ....policies.errors import ClosedError, InternalError, LaunchError, PolicyError, SessionLost
from ....policies.plan import Plan
from ....policies.policy import Limits
from ....runner.capture import OnOutput
from ....runner.performance import NEVER
from ....runner.result import SandboxResult
from ....runner.workspace import WorkspaceFile
from ..local import PolicyLike
from ..program import Program
from ..request import CallArguments
from ..session import Session, own
from ..workspaces.store import Workspaces
from .arguments import packed, result_of
from .connections import Line
from .frames import (
    Close,
    Content,
    Describe,
    Description,
    Done,
    Download,
    Executed,
    Files,
    Fork,
    Judged,
    ListFiles,
    Look,
    Open,
    Opened,
    SessionGiven,
    Settle,
    Snapshot,
    Told,
    Validate,
)

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog

_R = TypeVar("_R", bound=msgspec.Struct)


class DaemonsCells:
    """Cells of the daemon that listens at `path`, under its policy of that name."""

    audit: "AuditLog | None" = None  # the daemon's

    def __init__(self, path: str | os.PathLike[str], policy: PolicyLike | None) -> None:
        if not isinstance(policy, str | None):
            raise PolicyError("connect: policy is the name of one that the daemon has")
        self._asking = _Asking(Line(os.fspath(path), policy or ""))
        try:
            described = self._asking.ask(Describe(), Description)
        except BaseException:
            self.close()
            raise
        self.policy = described.policy
        self.plan: Plan = described.plan

    @property
    def workspaces(self) -> Workspaces:
        raise PolicyError("workspaces: a daemon keeps none for those who connect")

    def execute(
        self, code: str | bytes, language: str, on_output: OnOutput | None, cancel: int,
        given: CallArguments,
    ) -> SandboxResult:  # fmt: skip
        _refuse_workspace(given.workspace, given.clean)
        asking, limits = self._asking, self.policy.limits
        return asking.execute(code, language, on_output, cancel, given, limits)

    def program(self, argv: Sequence[str], given: dict[str, Any]) -> Program:
        raise PolicyError(
            "program: a daemon starts none for those who connect",
            "make a Sandbox without connect= for it",
        )

    def session(self, id: str | None, language: str, workspace: str | None, clean: bool) -> Session:
        _refuse_workspace(workspace, clean)
        opened = self._asking.ask(Open(id, SessionGiven(language=language)), Opened)
        return AttachedSession(self._asking, opened, self.policy.limits)

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        judged = self._asking.ask(Validate(code.encode(errors="surrogatepass")), Judged)
        return judged.passes, judged.finding

    def settle(self) -> None:
        self._asking.ask(Settle(), Done)

    def close(self) -> None:
        self._asking.line.close()


def _refuse_workspace(name: str | None, clean: bool) -> None:
    if name is not None or clean:
        raise PolicyError(
            "workspace: a daemon keeps none for those who connect",
            "snapshot() and restore() of a session move its files",
        )


class AttachedSession(Session):
    """A session whose cell is a daemon's; it outlives this process unless it is closed."""

    def __init__(self, asking: "_Asking", opened: Opened, limits: Limits) -> None:
        self.id = opened.id
        self.diverged = opened.diverged
        self._asking = asking
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
            self._lost = self._lost or self._asking.ask(Look(self._key), Told).lost
        except (ClosedError, LaunchError) as error:  # nothing of it is left, or within reach
            return error.what
        return self._lost

    def _execute(
        self, code: str | bytes, language: str, given: CallArguments, on_output: OnOutput | None,
        cancel: int,
    ) -> SandboxResult:  # fmt: skip
        return self._asking.execute(
            code, language, on_output, cancel, own(given), self._limits, self._key
        )

    def download(self, path: str) -> bytes:
        return self._asking.ask(Download(self._key, path), Content).data

    def files(self) -> tuple[WorkspaceFile, ...]:
        return self._asking.ask(ListFiles(self._key), Files).files

    def snapshot(self) -> bytes:
        return self._asking.ask(Snapshot(self._key), Content).data

    def fork(self) -> Session:
        opened = self._asking.ask(Fork(self._key), Opened)
        return AttachedSession(self._asking, opened, self._limits)

    def close(self) -> None:
        """End it, for all who are attached; closing twice is fine, and so is a daemon that is gone."""
        self._close_aexecutor()
        try:
            self._asking.ask(Close(self._key), Done)
        except (ClosedError, LaunchError, SessionLost):
            return


class _Asking:
    """Requests with the type of their reply."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        reply = self.line.ask(request, on_output, cancel)
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

"""`AttachedSession`: a session of a daemon, as a client has it."""

from ....policies.errors import ClosedError, LaunchError, SessionLost
from ....policies.policy import Limits
from ....runner.capture import OnOutput
from ....runner.result import SandboxResult
from ....runner.workspace import WorkspaceFile
from ..parameters import CallArguments
from ..session import Session, own
from .frames import (
    CheckSession,
    CloseSession,
    Content,
    Done,
    Download,
    Files,
    ForkSession,
    ListSessionFiles,
    LostReason,
    Opened,
    TakeSnapshot,
)
from .requests import Requests


class AttachedSession(Session):
    """A session whose cell is a daemon's; it outlives this process unless it is closed."""

    def __init__(self, requests: Requests, opened: Opened, limits: Limits) -> None:
        self.id = opened.id
        self.diverged = opened.diverged
        self._requests = requests
        self._key = opened.session
        self._language = opened.language
        self._limits = limits
        self._lost = LostReason("")

    @property
    def language(self) -> str:
        return self._language

    @property
    def lost(self) -> str:
        return self._ask_whether_lost().lost

    @property
    def expired(self) -> str:
        return self._ask_whether_lost().expired

    def _ask_whether_lost(self) -> LostReason:
        try:
            if not self._lost.lost:
                self._lost = self._requests.ask(CheckSession(self._key), LostReason)
        except (ClosedError, LaunchError) as error:  # the session has ended, or cannot be reached
            return LostReason(error.what)
        return self._lost

    def has_tool(self, name: str) -> bool:
        return False

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

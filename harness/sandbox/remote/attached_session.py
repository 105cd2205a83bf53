"""`AttachedSession`: a session of a daemon, as a client has it."""

import os
from typing import TYPE_CHECKING

from ....policies.errors import ClosedError, InternalError, LaunchError, SessionLost
from ....policies.policy import Limits, check_limit
from ....runner.cells.workspace import WorkspaceFile
from ....runner.requests.result import SandboxResult
from ..parameters import CallArguments, TerminalArguments
from ..sessions.session import Session, own
from . import frames
from .connections import Requests

if TYPE_CHECKING:
    from ..network.exposed_ports import ExposedPort
    from ..programs.terminal import Terminal


class AttachedSession(Session):
    """A session whose cell is a daemon's; it outlives this process unless it is closed."""

    def __init__(self, requests: Requests, opened: frames.Opened, limits: Limits) -> None:
        self.id = opened.id
        self.diverged = opened.diverged
        self._requests = requests
        self._key = opened.session
        self._language = opened.language
        self._limits = limits
        self._lost = frames.LostReason("")
        self.forked_by = opened.forked_by
        self.not_copied = opened.not_copied

    @property
    def language(self) -> str:
        return self._language

    @property
    def lost(self) -> str:
        return self._ask_whether_lost().lost

    @property
    def expired(self) -> str:
        return self._ask_whether_lost().expired

    @property
    def paused(self) -> bool:
        return self._ask_whether_lost().paused

    def _ask_whether_lost(self) -> frames.LostReason:
        try:
            if not self._lost.lost:
                self._lost = self._requests.ask(frames.CheckSession(self._key), frames.LostReason)
        except (ClosedError, LaunchError) as error:  # the session has ended, or cannot be reached
            return frames.LostReason(error.what)
        return self._lost

    def has_tool(self, name: str) -> bool:
        return False

    def _execute(self, given: CallArguments) -> SandboxResult:
        return self._requests.execute(own(given), self._limits, self._key)

    def download(self, path: str) -> bytes:
        return self._requests.ask(frames.Download(self._key, path), frames.Content).data

    def files(self) -> tuple[WorkspaceFile, ...]:
        return self._requests.ask(frames.ListSessionFiles(self._key), frames.Files).files

    def snapshot(self) -> bytes:
        return self._requests.ask(frames.TakeSnapshot(self._key), frames.Content).data

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> "ExposedPort":
        from ..checks import check_host_path  # seldom needed
        from ..network.exposed_ports import ExposedPort, check_port

        check_port("port", port, least=1)
        if host_port is not None:
            check_port("host_port", host_port, least=0)
        place = None if path is None else os.path.abspath(check_host_path("path", path))
        exposed = self._requests.ask(
            frames.ExposePort(self._key, port, place, host_port), frames.PortExposed
        )
        return ExposedPort(port, exposed.address, lambda: self._close_port(exposed.port))

    def _close_port(self, key: str) -> None:
        try:
            self._requests.ask(frames.ClosePort(key), frames.Done)
        except (ClosedError, LaunchError):  # the daemon has ended, and closed it
            return

    def extend(self, seconds: float) -> None:
        check_limit("seconds", seconds)
        self._requests.ask(frames.ExtendSession(self._key, seconds), frames.Done)

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        from ..calls.call_request import check_size
        from ..calls.session_commands import argv_of  # seldom needed
        from ..programs.background_processes import BackgroundProcess, ProcessReport
        from ..programs.terminal import Terminal, command_of

        command = command_of(given)
        size, argv = check_size(given.rows, given.columns), argv_of(command)
        asked = frames.OpenTerminal(
            self._key, argv, command.cwd, dict(command.env or {}), *size, given.trace_id
        )
        told, master, release = self._requests.hold(asked)
        if not isinstance(told, frames.TerminalOpened):
            release()
            raise InternalError(f"the daemon answered with {type(told).__name__}")
        process = BackgroundProcess(
            self._processes(), ProcessReport(told.id, told.pid, argv, told.exit_code)
        )
        return Terminal(master, process, release)

    def fork(self) -> Session:
        opened = self._requests.ask(frames.ForkSession(self._key), frames.Opened)
        return AttachedSession(self._requests, opened, self._limits)

    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> tuple[Session, ...]:
        from ..checks import check_branches, check_flag

        asked = frames.BranchSession(
            self._key, check_branches(n), check_flag("reseed", reseed), check_flag("replay", replay)
        )
        made = self._requests.ask(asked, frames.OpenedBranches).sessions
        return tuple(AttachedSession(self._requests, each, self._limits) for each in made)

    def pause(self) -> str:
        return self._requests.ask(frames.PauseSession(self._key), frames.Paused).token

    def close(self) -> None:
        """End the session for every client attached to it; harmless if it or the daemon has ended."""
        self._close_aexecutor()
        try:
            self._requests.ask(frames.CloseSession(self._key), frames.Done)
        except (ClosedError, LaunchError, SessionLost):
            return

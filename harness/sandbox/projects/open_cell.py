"""`OpenCell`: the cell of a project that stays open between commands.

It is that of a session, whose program listens on a Unix socket in /workspace for commands with their
streams.  Each command is given pipes that this process made, or a terminal of the cell.  All that
answers on the socket is the cell, which is hostile: nobody here reads more of it than a number.
"""

import json
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ....policies.closing import Closing
from ....policies.errors import LaunchError, SessionLost
from ....policies.languages import PYTHON
from ....runner.cells.cell_network import open_terminal, resize
from ....runner.kernel.file_calls import open_beneath
from ....runner.settings import SessionSettings
from ..parameters import CallArguments
from ..programs.background_processes import CELL_MODULE, code_calling
from ..sandbox import Sandbox
from ..sessions.cell_session import CellSession
from .project_policy import ProjectPolicy
from .project_run import ONE_CELL, directory_of, program_of

_SOCKET = ".cellwright"
_SECONDS = 30.0  # for the cell to take a command
_LENGTH = struct.Struct("!I")
_KEPT = ("HOME", "PATH")  # variables of the cell: each command has its own others


class ProjectCommand(NamedTuple):
    """A command, from `cwd` if that lies in the project; `terminal`: rows and columns."""

    command: Sequence[str]
    cwd: str
    terminal: tuple[int, int] | None


class OpenCell(Closing):
    """Safe from many threads; commands run beside each other."""

    def __init__(self, shown: ProjectPolicy, settings: SessionSettings) -> None:
        """Open it; raises PolicyError, LaunchError."""
        self.root = shown.project.root
        environment = {name: shown.policy.environment[name] for name in _KEPT}
        policy = replace(shown.policy, environment=environment)
        self._sandbox = Sandbox(policy=policy, pool=ONE_CELL, sessions=settings, audit=False)
        try:
            session = self._sandbox.session()
            assert isinstance(session, CellSession)  # noqa: S101 - for mypy: cells are local
            self._session = session
            code = code_calling(CELL_MODULE, "serve", f"/workspace/{_SOCKET}")
            result = session._execute(CallArguments(code=code, language=PYTHON))
            if not result.ok:
                raise LaunchError(f"the cell of {self.root} takes no commands: {result.error}")
        except BaseException:
            self._sandbox.close()
            raise

    @property
    def lost(self) -> str:
        """Why it has ended, such as that it was idle for long; empty while it has not."""
        return self._session.lost

    def run(
        self, given: ProjectCommand, shown: ProjectPolicy,
        hand_over: Callable[[tuple[int, ...]], None], await_end: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Start a command whose variables are those of `shown`.

        `hand_over` gives the client a connection to the cell, then the master of the terminal, or pipes
        to standard input, and from output and errors. Over the connection go signals, one byte each;
        four bytes come that are the status, and then the client sends the pipes that it has read.
        `await_end` waits for the end of the client, or of the cell behind the connection.  The command
        is killed if the client ends first.

        Raises SessionLost, LaunchError, BusyError.
        """
        cell = self._session.cell
        cell.begin_use()
        try:
            with cell.held() as workspace, _connected(workspace) as connection:
                theirs, ours, terminal = _streams(workspace, given.terminal)
                try:
                    asked = _request(self.root, given, shown, terminal)
                    socket.send_fds(connection, [_LENGTH.pack(len(asked))], theirs)
                    connection.sendall(asked)
                    hand_over((connection.fileno(), *ours))
                except OSError as error:
                    raise LaunchError(f"the open cell takes no command: {error}") from None
                finally:
                    _close((*theirs, *ours))
                await_end(connection.fileno())
        finally:
            cell.end_use()

    def close(self) -> None:
        """End every process of the cell; closing twice is fine."""
        self._sandbox.close()


def _request(root: str, given: ProjectCommand, shown: ProjectPolicy, terminal: str) -> bytes:
    directory = directory_of(root, given.cwd)
    name, *rest = given.command
    words = [program_of(directory, name), *rest]
    return json.dumps([words, directory, shown.policy.environment, terminal]).encode()


def _connected(workspace: int) -> socket.socket:
    """Connect to the cell's program: to a socket in its own /workspace, through no link, since the cell
    may have put another file there."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_SECONDS)
    try:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        place = open_beneath(workspace, _SOCKET.encode(), flags)
        try:
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                raise FileNotFoundError("it is another file")
            sock.connect(f"/proc/self/fd/{place}")
        finally:
            os.close(place)
    except OSError as error:
        sock.close()
        raise SessionLost(f"the open cell takes no commands any more: {error}") from None
    return sock


def _streams(workspace: int, terminal: tuple[int, int] | None) -> tuple[list[int], list[int], str]:
    """Return what the cell gets, what the client gets, and the path of the terminal."""
    if terminal:
        opened = open_terminal(workspace)
        resize(opened.master, *terminal)
        return [], [opened.master], opened.path
    (stdin, feed), (output, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
    return [stdin, stdout, stderr], [feed, output, errors], ""


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)

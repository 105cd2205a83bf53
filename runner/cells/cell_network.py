"""`CellNetwork`: the network namespace of one cell, in which its launcher makes sockets for the host.

A socket belongs for good to the namespace in which it was made (network_namespaces(7)).  The launcher
makes one there and sends it out, and the host connects it to a server of the cell.  Nothing else leads
in.
"""

import errno
import fcntl
import os
import socket
import stat
import struct
import termios
import threading
from typing import TYPE_CHECKING, NamedTuple

from ...policies.errors import BusyError, ClosedError, InternalError, LauncherLost, LaunchError
from .. import channel
from ..fixed_root import TERMINALS
from ..kernel import file_calls as files
from ..messages import Failed, SocketMade, decode
from .cell import number_in_launcher

if TYPE_CHECKING:
    from ..launching.launcher_process import Launcher


class CellNetwork:
    """Asks for sockets in the network namespace of one cell; safe from many threads.

    It has a pidfd of its own: the cell may be taken down at any time, and its descriptors with it.
    """

    def __init__(self, launcher: "Launcher", guest: int) -> None:
        """`guest` is a pidfd of the cell's guest."""
        self._launcher = launcher
        self._lock = threading.Lock()
        self._guest = os.dup(guest)

    def ask(self) -> socket.socket:
        """Ask for a TCP socket; return the channel on which `answered` finds it.

        Raises LaunchError if the cell has ended, and ClosedError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.ask_on(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def ask_on(self, channel: int) -> None:
        """Ask for a TCP socket, which is sent to the other end of `channel`; raises as `ask` does."""
        with self._lock:
            self._require_open()
            try:
                number = number_in_launcher(self._guest)
            except ProcessLookupError:
                raise LaunchError("the cell has ended") from None
            self._launcher.ask_for_socket(self._guest, number, channel)

    def copy(self) -> "CellNetwork":
        """Return another one of the same cell, to be closed by itself; raises ClosedError."""
        with self._lock:
            self._require_open()
            return CellNetwork(self._launcher, self._guest)

    def _require_open(self) -> None:
        if self._guest < 0:
            raise ClosedError("the cell has ended")

    def close(self) -> None:
        """Ask for no more sockets; closing twice is fine."""
        with self._lock:
            guest, self._guest = self._guest, -1
        if guest >= 0:
            os.close(guest)


def answered(answer: socket.socket) -> socket.socket:
    """Return the socket that has come on `answer`, not connected and not blocking.

    Raises LaunchError if none could be made, LauncherLost.
    """
    frame, received = channel.receive_with_descriptors(answer)
    if not frame:
        raise LauncherLost(cell_began=True)
    message = decode(frame, SocketMade | Failed)
    if isinstance(message, Failed):
        raise LaunchError(f"no socket in the cell: {message.words}")
    (descriptor,) = received
    made = socket.socket(fileno=descriptor)
    if made.type != socket.SOCK_STREAM or made.family not in (socket.AF_INET, socket.AF_INET6):
        made.close()
        raise InternalError("the launcher sent another socket than one of TCP")
    made.setblocking(False)
    return made


# Terminals: the master is opened in the cell's own devpts, which is reached from /workspace by
# names that the guest cannot change, since the root of a cell is read-only. No process of a cell
# ever has this master, and no cell ever has a descriptor of a terminal of the host.
_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431  # ioctl_tty(2)
_MASTER = f"..{TERMINALS}/ptmx".encode()  # from /workspace
_PTMX = os.makedev(5, 2)
_INT = struct.Struct("=i")
_SIZE = struct.Struct("=4H")  # struct winsize
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
_HOSTS = "/dev/pts"
_ALL_TAKEN = "programs of the cell hold every terminal that it may have"


class OpenedTerminal(NamedTuple):
    """A master, which does not block, and the path of its terminal in the cell."""

    master: int
    path: str


def open_terminal(workspace: int) -> OpenedTerminal:
    """Open a terminal of the cell whose /workspace is open; raises LaunchError, and BusyError if
    programs of the cell have all that it may have."""
    try:
        master = files.open_from(workspace, _MASTER, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise BusyError(_ALL_TAKEN, "end programs that made terminals, such as tmux") from None
        raise LaunchError(f"cannot open a terminal of the cell: {error.strerror}") from None
    try:
        _check(master)
        number = _INT.unpack(fcntl.ioctl(master, _TIOCGPTN, _INT.pack(0)))[0]
        fcntl.ioctl(master, _TIOCSPTLCK, _INT.pack(0))
    except BaseException:
        os.close(master)
        raise
    return OpenedTerminal(master, f"{TERMINALS}/{number}")


def _check(master: int) -> None:
    """Raise LaunchError unless it is the master of a terminal that is not the host's."""
    found = os.fstat(master)
    is_master = stat.S_ISCHR(found.st_mode) and found.st_rdev == _PTMX
    if not is_master or (os.path.isdir(_HOSTS) and found.st_dev == os.stat(_HOSTS).st_dev):
        raise LaunchError("the terminal of a cell is another file")


def resize(master: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; its foreground programs get SIGWINCH if it changes."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, _SIZE.pack(rows, columns, 0, 0))

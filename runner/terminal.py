"""Terminals of a cell: the supervisor opens the master, programs of the cell have the other end.

The master is opened in the cell's own devpts, which is reached from /workspace by names that the guest
cannot change, since the root of a cell is read-only.  No process of a cell ever has this master, and no
cell ever has a descriptor of a terminal of the host.
"""

import fcntl
import os
import stat
import struct
import termios
from typing import NamedTuple

from ..policies.errors import LaunchError
from .fixed_root import TERMINALS
from .kernel import files

_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431  # ioctl_tty(2)
_MASTER = f"..{TERMINALS}/ptmx".encode()  # from /workspace
_PTMX = os.makedev(5, 2)
_INT = struct.Struct("=i")
_SIZE = struct.Struct("=4H")  # struct winsize
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
_HOSTS = "/dev/pts"


class OpenedTerminal(NamedTuple):
    """A master, which does not block, and the path of its terminal in the cell."""

    master: int
    path: str


def open_terminal(workspace: int) -> OpenedTerminal:
    """Open a terminal of the cell whose /workspace is open; raises LaunchError."""
    try:
        master = files.open_from(workspace, _MASTER, _FLAGS)
    except OSError as error:
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

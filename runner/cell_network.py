"""`CellNetwork`: the network namespace of one cell, in which its launcher makes sockets for the host.

A socket belongs for good to the namespace in which it was made (network_namespaces(7)).  The launcher
makes one there and sends it out, and the host connects it to a server of the cell.  Nothing else leads
in.
"""

import os
import socket
import threading
from typing import Protocol

from ..policies.errors import ClosedError, InternalError, LauncherLost, LaunchError
from . import channel
from .cells import number_in_launcher
from .messages import Failed, SocketMade, decode


class SocketOpener(Protocol):
    """A launcher."""

    def ask_for_socket(self, guest: int, number: int, answer: int) -> None: ...


class CellNetwork:
    """Asks for sockets in the network namespace of one cell; safe from many threads.

    It has a pidfd of its own: the cell may be taken down at any time, and its descriptors with it.
    """

    def __init__(self, launcher: SocketOpener, guest: int) -> None:
        """`guest` is a pidfd of the cell's guest."""
        self._launcher = launcher
        self._lock = threading.Lock()
        self._guest = os.dup(guest)

    def ask(self) -> socket.socket:
        """Ask for a TCP socket; return the channel on which `answered` finds it.

        Raises LaunchError if the cell has ended, and ClosedError.
        """
        with self._lock:
            self._require_open()
            try:
                number = number_in_launcher(self._guest)
            except ProcessLookupError:
                raise LaunchError("the cell has ended") from None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._launcher.ask_for_socket(self._guest, number, theirs.fileno())
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        ours.setblocking(False)
        return ours

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
        raise LaunchError(f"no socket in the cell: {message.message}: {os.strerror(message.errno)}")
    (descriptor,) = received
    made = socket.socket(fileno=descriptor)
    if (made.family, made.type) != (socket.AF_INET, socket.SOCK_STREAM):
        made.close()
        raise InternalError("the launcher sent another socket than one of TCP")
    made.setblocking(False)
    return made

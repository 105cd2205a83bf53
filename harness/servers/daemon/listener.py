"""Where clients come in: who may, and who is told at once why not."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

from ....policies.errors import CellwrightError, PolicyError
from ....runner import channel
from ....runner.messages import encode
from ...sandbox.remote.address import peer_of
from ...sandbox.remote.failures import failure_of
from .connection import ClientConnection
from .limits import Accounts, ServeLimits

_ACCEPTED_AT_ONCE = 32  # then it is others' turn
_REST_SECONDS = 0.2  # between attempts to accept without a descriptor to spare
_NEVER = float("inf")


class ClientListener:
    """A socket that listens, in the poll of the daemon's loop until it is closed.

    `deadline`, by time.monotonic(), is when `keep_deadline` has something to do.
    """

    def __init__(
        self, listener: socket.socket, poll: select.poll, accounts: Accounts, limits: ServeLimits
    ) -> None:
        listener.setblocking(False)
        poll.register(listener, select.POLLIN)
        self.deadline = _NEVER
        self._listener = listener
        self._poll = poll
        self._accounts = accounts
        self._limits = limits

    def fileno(self) -> int:
        return self._listener.fileno()

    def admit(self) -> Iterator[ClientConnection]:
        """Yield the connections of those who wait and may come in."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:  # EMFILE, ENFILE, ENOMEM: the queue stays as it is, and we do not spin
                self._poll.unregister(self._listener)
                self.deadline = time.monotonic() + _REST_SECONDS
                return
            if connection := self._connect(sock):
                yield connection

    def _connect(self, sock: socket.socket) -> ClientConnection | None:
        """Let in a process of our own user; root too has a daemon of its own."""
        pid, uid = peer_of(sock)
        try:
            if uid != os.geteuid():
                raise PolicyError(f"this daemon serves user {os.geteuid()}, not {uid}")
            return ClientConnection(sock, pid, self._accounts, self._limits)
        except CellwrightError as error:
            _refuse(sock, error)
            return None

    def keep_deadline(self, now: float) -> None:
        """Listen again, after a rest."""
        if self.deadline <= now:
            self.deadline = _NEVER
            self._poll.register(self._listener, select.POLLIN)

    def close(self) -> None:
        """Let nobody in any more; closing twice is fine."""
        self.deadline = _NEVER
        with contextlib.suppress(KeyError, ValueError):  # it rests, or it was closed
            self._poll.unregister(self._listener)
        self._listener.close()


def _refuse(sock: socket.socket, error: CellwrightError) -> None:
    """Say why and hang up, without waiting for anybody."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        channel.send(sock, encode(failure_of(error)))
    sock.close()

"""The listening socket: accepts processes of tenants and tells others why not."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator

from ....policies.errors import CellwrightError
from ....runner import channel
from ....runner.messages import encode
from ...sandbox.remote.failures import failure_of
from .connection import ClientConnection
from .limits import ClientQuotas
from .observer import USER, RequestObserver
from .peers import peer_at
from .tenants import Tenants

_ACCEPTED_AT_ONCE = 32  # then open connections get their turn
_PAUSE_SECONDS = 0.2  # before accepting again after EMFILE
_NEVER = float("inf")


class ClientListener:
    """A listening socket, registered in the poll of the daemon's event loop until it is closed.

    `deadline` (time.monotonic()) is when `keep_deadline` has to be called.
    """

    def __init__(
        self, listener: socket.socket, poll: select.poll, tenants: Tenants,
        observer: RequestObserver,
    ) -> None:  # fmt: skip
        listener.setblocking(False)
        poll.register(listener, select.POLLIN)
        self.deadline = _NEVER
        self._listener = listener
        self._poll = poll
        self._tenants = tenants
        self._limits = tenants.limits
        has_tenants = tenants.plan.rules.socket_group is not None
        self._quotas = ClientQuotas(self._limits, has_tenants=has_tenants)
        self._observer = observer

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> Iterator[ClientConnection]:
        """Accept pending connections and yield those that are allowed."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except (
                OSError
            ):  # EMFILE, ENFILE, ENOMEM: poll would report the same queue again and again
                self._poll.unregister(self._listener)
                self.deadline = time.monotonic() + _PAUSE_SECONDS
                return
            if connection := self._connect(sock):
                yield connection

    def _connect(self, sock: socket.socket) -> ClientConnection | None:
        """Accept a process of our own user, or of the configured group, only: root too has a daemon of
        its own."""
        peer = peer_at(sock)
        try:
            peer = peer._replace(tenant=self._tenants.tenant_of(peer.uid, peer.groups))
            return ClientConnection(sock, peer, self._quotas, self._limits)
        except CellwrightError as error:
            self._observer.note_refused(peer, error, USER)
            _refuse(sock, error)
            return None

    def keep_deadline(self, now: float) -> None:
        """Accept again after a pause."""
        if self.deadline <= now:
            self.deadline = _NEVER
            self._poll.register(self._listener, select.POLLIN)

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        self.deadline = _NEVER
        with contextlib.suppress(KeyError, ValueError):  # paused, or already closed
            self._poll.unregister(self._listener)
        self._listener.close()


def _refuse(sock: socket.socket, error: CellwrightError) -> None:
    """Send the reason and close, without waiting."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        channel.send(sock, encode(failure_of(error)))
    sock.close()

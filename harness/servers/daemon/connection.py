"""One client's connection, as the daemon has it: what it said so far, and what it is told.

It belongs to the daemon's loop, or, while a request runs, to the thread that carries it out.  The
socket is then what cancels the request: anything that the client says meanwhile, its end included,
makes it readable.
"""

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from ....runner import channel
from ....runner.messages import encode
from ...sandbox.remote.frames import Output
from .limits import HELLO_BYTES, Accounts, ServeLimits

if TYPE_CHECKING:
    from .service import Service


class ClientConnection:
    """Counted in `accounts` from the beginning to `close`; raises BusyError if there are too many."""

    def __init__(
        self, sock: socket.socket, client: int, accounts: Accounts, limits: ServeLimits
    ) -> None:
        accounts.connect(client)
        sock.setblocking(False)
        self.client = client  # the pid
        self.service: Service | None = None  # once it has greeted
        self.deadline = time.monotonic() + limits.hello_seconds
        self._socket = sock
        self._accounts = accounts
        self._limits = limits
        self._receiver = channel.Receiver(sock, HELLO_BYTES)
        self._held = 0
        self._running = self._begun = self._closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Take one packet: the frame that it ends, None if it ends none, b"" at the end.

        The descriptors beside it are discarded by the kernel (see channel.Receiver).  Raises
        channel.ProtocolError, and BusyError if too much is held.
        """
        try:
            frame = self._receiver.receive()
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._hold(len(frame) if frame else self._receiver.held_bytes)
        if frame is None and self.service and not self._begun:
            self._begun = True  # the first packet of a longer frame: the rest has to follow
            self.deadline = time.monotonic() + self._limits.frame_seconds
        return frame

    def welcome(self, service: "Service") -> None:
        """Accept requests from now on."""
        self.service = service
        self._receiver = channel.Receiver(self._socket, self._limits.request_bytes)
        self.rest()

    def begin(self) -> None:
        """Note that a request is at work; raises BusyError."""
        self._accounts.begin(self.client)
        self._running = True
        self.deadline = float("inf")

    def weigh(self, extra: int) -> None:
        """Count what decoding adds to the bytes of a frame; raises BusyError."""
        self._hold(self._held + extra)

    def rest(self) -> None:
        """Note that nothing is at work and nothing is held."""
        self._release()
        self._begun = False
        self.deadline = time.monotonic() + self._limits.idle_seconds

    def tell(self, frame: msgspec.Struct, *, last: bool = False) -> None:
        """Send a frame, waiting so long for a slow reader; whoever does not read has hung up.

        Before its last packet a reply that is the `last` word gives back what the request took: who
        hears it may ask again at once.
        """
        deadline = time.monotonic() + self._limits.reader_seconds
        try:
            *packets, final = channel.packets(encode(frame))
            for packet in packets:
                self._send(packet, deadline)
            if last:
                _wait_for_room(self._socket, deadline - time.monotonic())
                self._release()
            self._send(final, deadline)
        except OSError:
            self.cut()

    def tell_at_once(self, frame: msgspec.Struct) -> bool:
        """Send a short frame without waiting; tell whether there was room."""
        try:
            channel.send(self._socket, encode(frame))
        except OSError:
            return False
        return True

    def on_output(self, stream: str, data: bytes) -> None:
        self.tell(Output(stream, data))  # type: ignore[arg-type] # one of the two

    def is_gone(self) -> bool:
        """Tell whether the client has said something, its end included, or was hung up on."""
        return channel.has_news(self._socket.fileno())

    def hang_up(self) -> None:
        """Make the socket readable, which cancels what runs; what comes of it can still be told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def cut(self) -> None:
        """End the talk both ways; a thread that waits for the client no longer does."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back everything; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._release()
            self._accounts.disconnect(self.client)
            self._socket.close()

    def _hold(self, size: int) -> None:
        if size > self._held:
            self._accounts.hold(self.client, size - self._held)
            self._held = size

    def _release(self) -> None:
        self._accounts.drop(self.client, self._held)
        self._held = 0
        if self._running:
            self._accounts.end(self.client)
            self._running = False

    def _send(self, packet: bytes, deadline: float) -> None:
        while True:
            try:
                return channel.send_packet(self._socket, packet)
            except BlockingIOError:
                _wait_for_room(self._socket, deadline - time.monotonic())


def _wait_for_room(sock: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if seconds <= 0 or not poll.poll(seconds * 1000):
        raise TimeoutError("it does not read")

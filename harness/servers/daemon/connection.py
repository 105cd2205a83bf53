"""One client's connection in the daemon: frames from the client and replies to it.

The daemon's event loop owns a connection, or, while a request runs, the thread that runs it.  The
socket then cancels the request: anything that the client sends meanwhile, the end of the connection
included, makes it readable.
"""

import contextlib
import select
import socket
import time

import msgspec

from ....runner import channel
from ....runner.messages import encode
from ...sandbox.remote.frames import OutputChunk
from .limits import HELLO_BYTES, ClientQuotas, ServeLimits
from .peers import Peer


class ClientConnection:
    """Counts in `quotas` from its creation to `close`; creating one too many raises BusyError."""

    def __init__(
        self, sock: socket.socket, peer: Peer, quotas: ClientQuotas, limits: ServeLimits
    ) -> None:
        quotas.connections.take(peer)
        sock.setblocking(False)
        self.peer = peer
        self.policy: str | None = None  # its name, set by the greeting
        self.deadline = time.monotonic() + limits.hello_seconds
        self._socket = sock
        self._quotas = quotas
        self._limits = limits
        self._receiver = channel.Receiver(sock, HELLO_BYTES)
        self._held = 0
        self._running = self._begun = self._closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Read one packet; return the frame that it completes, None if it completes none, b"" at the
        end.

        The kernel discards descriptors that come beside it (see channel.Receiver).  Raises
        channel.ProtocolError, and BusyError if the client holds too many bytes.
        """
        try:
            frame = self._receiver.receive()
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._hold(len(frame) if frame else self._receiver.held_bytes)
        if frame is None and self.policy is not None and not self._begun:
            self._begun = True  # the first packet of a longer frame: the rest must follow in time
            self.deadline = time.monotonic() + self._limits.frame_seconds
        return frame

    def welcome(self, policy: str) -> None:
        """Accept requests under the policy of that name from now on."""
        self.policy = policy
        self._receiver = channel.Receiver(self._socket, self._limits.request_bytes)
        self.rest()

    def begin(self) -> None:
        """Count a request at work; raises BusyError."""
        self._quotas.requests.take(self.peer)
        self._running = True
        self.deadline = float("inf")

    def weigh(self, extra: int) -> None:
        """Count what decoding adds to the bytes of a frame; raises BusyError."""
        self._hold(self._held + extra)

    def rest(self) -> None:
        """Release what the request took, and start the idle timeout."""
        self._release()
        self._begun = False
        self.deadline = time.monotonic() + self._limits.idle_seconds

    def tell(self, frame: msgspec.Struct, *, last: bool = False) -> None:
        """Send a frame; a client that does not read it within `reader_seconds` is disconnected.

        A `last` reply releases what the request took before its final packet is sent: a client that
        has the reply may send the next request at once.
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
        """Send a short frame without waiting; tell whether it was sent."""
        try:
            channel.send(self._socket, encode(frame))
        except OSError:
            return False
        return True

    def on_output(self, stream: str, data: bytes) -> None:
        self.tell(OutputChunk(stream, data))  # type: ignore[arg-type] # one of the two

    def terminal_quota(self) -> contextlib.AbstractContextManager[None]:
        """Count a terminal of this client during the block; raises BusyError before it."""
        return self._quotas.terminals.held(self.peer)

    def lend(self, frame: msgspec.Struct, terminal: int) -> None:
        """Send a short frame with the master of a terminal, and wait until the client sends something
        or closes, `hang_up` is called, or no program has the terminal open."""
        try:
            channel.send(self._socket, encode(frame), (terminal,))
        except OSError:
            self.cut()
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(terminal, 0)  # POLLHUP
        poll.poll()

    def is_gone(self) -> bool:
        """Tell whether the client has sent something or closed, or `hang_up` was called."""
        return channel.has_news(self._socket.fileno())

    def hang_up(self) -> None:
        """Make the socket readable, which cancels the running request; its reply can still be sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def cut(self) -> None:
        """Shut the socket down both ways; a thread that waits for the client stops waiting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and release everything; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._release()
            self._quotas.connections.give_back(self.peer)
            self._socket.close()

    def _hold(self, size: int) -> None:
        if size > self._held:
            self._quotas.bytes.take(self.peer, size - self._held)
            self._held = size

    def _release(self) -> None:
        self._quotas.bytes.give_back(self.peer, self._held)
        self._held = 0
        if self._running:
            self._quotas.requests.give_back(self.peer)
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
        raise TimeoutError("the client does not read")

"""The listening socket: accepts processes of tenants, tells others why not, and holds their
connections.

The daemon's event loop owns a connection, or, while a request runs, the thread that runs it.  The
socket then cancels the request: anything that the client sends meanwhile, the end of the connection
included, makes it readable.  `RequestObserver` counts and logs the requests.
"""

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import msgspec

from ....policies.errors import CellwrightError, QuotaExceeded
from ....runner import channel
from ....runner.messages import encode
from ...sandbox.remote.call_frames import failure_of
from ...sandbox.remote.frames import Executed, Failure, OutputChunk
from ..measurements import Measurements
from ..request_log import LogValue, RequestLog
from .quotas import HELLO_BYTES, ClientQuotas, Peer, ServeLimits, peer_at
from .tenants import Tenants


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
            # After the first packet of a longer frame the rest must follow in time.
            self._begun = True
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
        """Release the resources of the request, and start the idle timeout."""
        self._release()
        self._begun = False
        self.deadline = time.monotonic() + self._limits.idle_seconds

    def tell(self, frame: msgspec.Struct, *, last: bool = False) -> None:
        """Send a frame; a client that does not read it within `reader_seconds` is disconnected.

        A `last` reply releases the request's resources before its final packet is sent, because a
        client that has the reply may send the next request at once.
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

    def hand_over(self, frame: msgspec.Struct, descriptors: tuple[int, ...]) -> None:
        """Send a short frame with copies of descriptors."""
        try:
            channel.send(self._socket, encode(frame), descriptors)
        except OSError:
            self.cut()

    def await_end(self, watched: int) -> None:
        """Wait until the client sends something or closes, `hang_up` is called, or nothing has the
        other end of `watched` open, a terminal or a socket."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(watched, 0)  # POLLHUP
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


INVALID, SLOW, USER = (
    "invalid frame",
    "time",
    "user",
)  # limits in addition to those of QuotaExceeded


class RequestObserver:
    """Safe from many threads; `log` is optional."""

    def __init__(self, measurements: Measurements, log: RequestLog | None = None) -> None:
        self.measurements = measurements
        self._log = log

    def note_reply(
        self, peer: Peer, policy: str, kind: str, reply: msgspec.Struct, seconds: float
    ) -> None:
        """Note a request that was answered; `kind` is the name of its frame."""
        outcome = reply.kind if isinstance(reply, Failure) else "ok"
        self.measurements.note_request(kind, outcome, seconds)
        more: dict[str, LogValue] = {}
        if isinstance(reply, Failure):
            more["why"] = reply.message
            if outcome == QuotaExceeded.__name__:
                self.measurements.note_refusal(peer.tenant, dict(reply.fields).get("limit", ""))
        elif isinstance(reply, Executed):
            result = reply.result
            more |= {"execution": result.execution_id, "status": result.status.value}
            more |= {"reason": result.reason, "trace": result.trace_id}
        self._tell(peer, kind, outcome, seconds, policy=policy, **more)

    def note_refused(self, peer: Peer, error: CellwrightError, limit: str = "") -> None:
        """Note a connection or request that was refused before it was decoded; `limit` says why, unless
        the error does."""
        limit = error.limit if isinstance(error, QuotaExceeded) else limit
        self.measurements.note_refusal(peer.tenant, limit)
        self._tell(peer, "refused", type(error).__name__, 0.0, limit=limit, why=error.what)

    def _tell(self, peer: Peer, kind: str, outcome: str, seconds: float, **more: LogValue) -> None:
        if self._log:
            about: dict[str, LogValue] = {"tenant": peer.tenant, "uid": peer.uid, "pid": peer.pid}
            self._log.note("daemon", kind, outcome, seconds, **about, **more)


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
        """Accept pending connections and yield the allowed ones."""
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
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        channel.send(sock, encode(failure_of(error)))
    sock.close()

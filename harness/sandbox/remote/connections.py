"""A client's pool of connections to a daemon: one for each running request, kept for the next.

A connection carries one request at a time.  So frames need no request number, and a client can cancel
only its own request.
"""

import _socket
import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from ....policies.errors import BusyError, CellwrightError, ClosedError, LaunchError, PolicyError
from ....runner import channel
from ....runner.capture import OnOutput
from ....runner.messages import decode, encode
from .address import check_length, peer_of
from .failures import error_of
from .frames import VERSION, Cancel, Failure, Hello, OutputChunk, Reply, Welcome

_CONNECT_SECONDS = 60  # to be accepted and welcomed: systemd may be starting the daemon
_SEND_SECONDS = 60  # for the daemon to take a packet
_CANCEL_SECONDS = 60.0  # from Cancel to the reply
_IDLE_SECONDS = 60.0  # the daemon closes idle connections much later
_REPLY_BYTES = 2 << 30
_KEPT = 16  # idle connections
_START = 'start one: "cellwright serve"'
_ANOTHER = 'start one of your own: "cellwright serve"'


class ConnectionPool:
    """Connections to one daemon for one policy; safe from many threads."""

    def __init__(self, path: str, policy: str) -> None:
        self._path = check_length(path)
        self._policy = policy
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    def ask(
        self, request: msgspec.Struct, on_output: OnOutput | None, cancel: int
    ) -> msgspec.Struct:
        """Return the reply; raises the exception that the daemon reports, ClosedError if the daemon
        ends meanwhile, and LaunchError if no daemon answers."""
        connection = self._take()
        try:
            reply = connection.ask(request, on_output, cancel)
        except BaseException as error:
            self._drop(connection)
            if self._closed and isinstance(error, ClosedError):
                raise ClosedError("the sandbox was closed while this ran") from None
            raise
        self._give_back(connection)
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def hold(self, request: msgspec.Struct) -> tuple[msgspec.Struct, int, Callable[[], None]]:
        """Send a request that the daemon goes on with until the returned function is called; return
        its reply, the descriptor beside it, and that function.  Raises what `ask` does."""
        connection = self._take()
        try:
            reply, descriptor = connection.ask_for_descriptor(request)
        except BaseException:
            self._drop(connection)
            raise
        if isinstance(reply, Failure):
            self._give_back(connection)
            raise error_of(reply)
        return reply, descriptor, lambda: self._drop(connection)

    def close(self) -> None:
        """Close every connection; a thread that waits for a reply gets ClosedError."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.cut()
        for connection in idle:
            connection.close()

    def _take(self) -> "_Connection":
        if (
            os.getpid() != self._owner
        ):  # before taking the lock: at the fork another thread may have held it
            raise ClosedError("the sandbox was made before this process forked: make a new one")
        connection = self._idle_connection() or _Connection(self._path, self._policy)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise ClosedError("the sandbox was closed")

    def _idle_connection(self) -> "_Connection | None":
        """Return the connection that was used last among those that still work, or None."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_good():
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: "_Connection") -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < _KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: "_Connection") -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


class _Connection:
    """One greeted connection to the daemon."""

    def __init__(self, path: str, policy: str) -> None:
        self._path = path
        self._socket = _connected(path)
        self._receiver = channel.Receiver(self._socket, _REPLY_BYTES)
        self._used_at = time.monotonic()
        try:
            self._welcome = self._greet(policy)
        except ClosedError as error:  # it is shutting down, or was just killed
            self.close()
            raise LaunchError(
                f"no daemon answers: {error}: it is shutting down, or serves only another user",
                _ANOTHER,
            ) from None
        except BaseException:
            self.close()
            raise

    def ask(
        self, request: msgspec.Struct, on_output: OnOutput | None, cancel: int
    ) -> msgspec.Struct:
        """Send a request and return its reply, which may be a Failure; pass output to `on_output`."""
        self._send(_encoded(request, self._welcome.request_bytes))
        waiting = _ReplyWait(self._socket, cancel)
        while True:
            if waiting.is_cancelled():
                with contextlib.suppress(
                    OSError
                ):  # the reply is already on its way, or the daemon is shutting down
                    channel.send(self._socket, encode(Cancel()))
                continue
            reply = self._receive()
            if isinstance(reply, OutputChunk) and on_output:
                on_output(reply.stream, reply.data)
            elif reply is not None:
                self._used_at = time.monotonic()
                return reply

    def ask_for_descriptor(self, request: msgspec.Struct) -> tuple[msgspec.Struct, int]:
        """Send a request; return its reply and the descriptor beside it, or a Failure and -1."""
        self._send(_encoded(request, self._welcome.request_bytes))
        try:
            frame, descriptors = channel.receive_with_descriptors(self._socket)
        except (channel.ProtocolError, OSError) as error:
            raise ClosedError(f"invalid frame from the daemon at {self._path}: {error}") from None
        try:
            reply = self._decoded(frame)
            if len(descriptors) != (0 if isinstance(reply, Failure) else 1):
                raise ClosedError(f"invalid descriptors from the daemon at {self._path}")
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise
        self._used_at = time.monotonic()
        return reply, descriptors[0] if descriptors else -1

    def is_good(self) -> bool:
        """Tell whether it can carry another request: the daemon has not closed it and will not soon."""
        recent = time.monotonic() - self._used_at < _IDLE_SECONDS
        return recent and not channel.has_news(self._socket.fileno())

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _greet(self, policy: str) -> Welcome:
        self._send(encode(Hello(VERSION, policy[:1024])))
        if not channel.has_news(self._socket.fileno(), _CONNECT_SECONDS):
            raise LaunchError(f"the daemon at {self._path} does not answer")
        reply = self._receive()
        if isinstance(reply, Failure):
            raise error_of(reply)
        if not isinstance(reply, Welcome):
            raise LaunchError(f"the server at {self._path} is not a daemon of this version")
        return reply

    def _send(self, frame: bytes) -> None:
        try:
            channel.send(self._socket, frame)
        except BlockingIOError:  # SO_SNDTIMEO
            raise BusyError(
                f"the daemon at {self._path} does not read: no packet taken within {_SEND_SECONDS} s"
            ) from None
        except OSError:  # the daemon closed the connection; its reason is still to be read
            return

    def _receive(self) -> msgspec.Struct | None:
        """Read one packet; return the frame that it completes, else None.  Raises ClosedError at the
        end."""
        try:
            frame = self._packet()
        except channel.ProtocolError as error:
            raise ClosedError(f"invalid frame from the daemon at {self._path}: {error}") from None
        return None if frame is None else self._decoded(frame)

    def _decoded(self, frame: bytes) -> msgspec.Struct:
        if not frame:
            raise ClosedError(f"the daemon at {self._path} closed the connection")
        try:
            reply: msgspec.Struct = decode(frame, Reply)
        except msgspec.DecodeError as error:
            raise ClosedError(f"invalid frame from the daemon at {self._path}: {error}") from None
        return reply

    def _packet(self) -> bytes | None:
        for _ in range(
            2
        ):  # the first may be ECONNRESET for data the daemon did not read; its frame follows
            with contextlib.suppress(ConnectionError):
                return self._receiver.receive()
        return b""


class _ReplyWait:
    """Waits for the daemon's next packet or for the caller to cancel; a second cancel is ignored."""

    def __init__(self, sock: _socket.socket, cancel: int) -> None:
        self._cancel = cancel
        self._deadline: float | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if cancel >= 0:
            self._poll.register(cancel, select.POLLIN)

    def is_cancelled(self) -> bool:
        """Wait for either; tell whether it was the cancel.  Raises ClosedError if no packet follows a
        cancel."""
        if self._cancel < 0 and self._deadline is None:
            return False  # the receive that follows waits
        patience = None if self._deadline is None else self._deadline - time.monotonic()
        ready = self._poll.poll(None if patience is None else max(0.0, patience) * 1000)
        if not ready:
            raise ClosedError(
                f"the daemon did not answer within {_CANCEL_SECONDS:g} s of the cancel"
            )
        if all(number != self._cancel for number, _ in ready):
            return False
        self._poll.unregister(self._cancel)
        self._cancel, self._deadline = -1, time.monotonic() + _CANCEL_SECONDS
        return True


def _encoded(request: msgspec.Struct, most: int) -> bytes:
    try:
        frame = encode(request)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise PolicyError(f"connect: an argument cannot be sent: {error}") from None
    if len(frame) > most:
        raise PolicyError(
            f"connect: the arguments take {len(frame)} bytes, the daemon takes at most {most}"
        )
    return frame


def _connected(path: str) -> _socket.socket:
    """Connect to a socket of our own user or of root; raises LaunchError."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        # connect(2) waits while the queue of connections is full (unix(7)); SO_SNDTIMEO bounds that
        # wait, and the wait for a slow reader.
        patience = struct.pack("ll", _CONNECT_SECONDS, 0)
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, patience)
        sock.connect(path)
        _, uid = peer_of(sock)
        if uid not in (0, os.geteuid()):
            raise LaunchError(
                f"the daemon at {path} belongs to user {uid}, which would see your programs",
                _ANOTHER,
            )
        patience = struct.pack("ll", _SEND_SECONDS, 0)
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, patience)
        return sock
    except PermissionError:
        sock.close()
        raise LaunchError(f"the daemon at {path} belongs to another user", _ANOTHER) from None
    except OSError as error:
        sock.close()
        raise LaunchError(f"no daemon answers at {path}: {error.strerror}", _START) from None
    except CellwrightError:
        sock.close()
        raise

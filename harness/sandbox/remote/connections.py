"""A client's pool of connections to a daemon, or a sandbox's to a worker: one for each running request,
kept for the next.

A connection carries one request at a time.  So frames need no request number, and a client can cancel
only its own request.

`Requests`: sends requests to a daemon and checks the type of each reply.
"""

import _socket
import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from ....policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    InternalError,
    LaunchError,
    PolicyError,
)
from ....policies.policy import Limits
from ....runner import channel
from ....runner.concurrency import NEVER
from ....runner.messages import decode, encode
from ....runner.requests.request import OnOutput
from ....runner.requests.result import SandboxResult
from ..parameters import CallArguments
from .address import check_length, peer_of
from .call_frames import error_of, packed, result_of
from .frames import VERSION, Cancel, Executed, Failure, Hello, OutputChunk, Reply, Welcome
from .lean_frames import CONNECT_SECONDS, REPLY_BYTES

OnDescriptors = Callable[[msgspec.Struct, list[int]], None]
_SEND_SECONDS = 60  # time for the daemon to accept a packet
_CANCEL_SECONDS = 60.0  # from Cancel to the reply
_IDLE_SECONDS = 60.0  # the daemon closes idle connections much later
_START = 'start one: "cellwright serve"'
_ANOTHER = 'start one of your own: "cellwright serve"'


class _UnknownFrameError(ClosedError):
    """A frame that this version does not know."""


class ConnectionPool:
    """Connections to one server for one policy; safe from many threads."""

    kept = 16  # idle connections

    def __init__(
        self, connect: Callable[[], _socket.SocketType], policy: str, server: str,
        replies: Any = Reply,
    ) -> None:  # fmt: skip
        """`connect` returns a connected socket; `server` names the other side in messages, which sends
        frames of the type `replies`."""
        self._connect = connect
        self._server = server
        self._policy = policy
        self._replies = replies
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    def ask(
        self, request: msgspec.Struct, on_output: OnOutput | None, cancel: int,
        on_descriptors: OnDescriptors | None = None,
    ) -> msgspec.Struct:  # fmt: skip
        """Return the reply; raises the exception that the daemon reports, ClosedError if the daemon
        ends meanwhile, and LaunchError if no daemon answers."""
        connection = self._take()
        try:
            reply = connection.ask(request, on_output, cancel, on_descriptors)
        except ClosedError as error:
            self._drop(connection)
            raise self._end_of(error) from None
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection)
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def _end_of(self, error: ClosedError) -> CellwrightError:
        """Return what the caller gets for a connection that ended."""
        return ClosedError("the sandbox was closed while this ran") if self._closed else error

    def hold(self, request: msgspec.Struct) -> tuple[msgspec.Struct, int, Callable[[], None]]:
        """Send a request that the daemon performs until the returned function is called; return its
        reply, its descriptor, and that function. Raises what `ask` does."""
        connection = self._take()
        try:
            reply, descriptor = connection.ask_for_descriptor(request)
        except ClosedError as error:
            self._drop(connection)
            raise self._end_of(error) from None
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
        self._closed = True
        self.cut()

    def cut(self) -> None:
        """End every connection: the server has ended, or will not be asked any more."""
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.cut()
        for connection in idle:
            connection.close()

    def _take(self) -> "_Connection":
        if (
            os.getpid() != self._owner
        ):  # before taking the lock, which another thread may have held at the fork
            raise ClosedError("the sandbox was made before this process forked: make a new one")
        with self._lock:
            while self._idle:
                connection = self._idle.pop()  # the one used last
                if connection.is_good():
                    self._busy.add(connection)
                    return connection
                connection.close()
        connection = self._new_connection()
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise ClosedError("the sandbox was closed")

    def _new_connection(self) -> "_Connection":
        return _Connection(self._connect(), self._policy, self._server, self._replies)

    def _give_back(self, connection: "_Connection") -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < self.kept:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: "_Connection") -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


class _Connection:
    """One greeted connection to the server, which owns `sock`."""

    def __init__(self, sock: _socket.SocketType, policy: str, server: str, replies: Any) -> None:
        self._server = server
        self._replies = replies
        self._socket = sock
        self._receiver = channel.Receiver(self._socket, REPLY_BYTES)
        self._used_at = time.monotonic()
        self._news = select.poll()
        self._news.register(sock, select.POLLIN)
        try:
            self._welcome = self._greet(policy)
        except _UnknownFrameError:
            self.close()
            raise LaunchError(
                f"{self._server} is of another version of cellwright",
                "after an upgrade restart it; else install the same version on both sides",
            ) from None
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
        self, request: msgspec.Struct, on_output: OnOutput | None, cancel: int,
        on_descriptors: OnDescriptors | None = None,
    ) -> msgspec.Struct:  # fmt: skip
        """Send a request and return its reply, which may be a Failure; pass output to `on_output`.

        `on_descriptors` gets the first frame if descriptors come with it, which it owns.
        """
        self._send(_encoded(request, self._welcome.request_bytes))
        waiting = _ReplyWait(self._socket, cancel) if cancel >= 0 else None
        while True:
            if waiting and waiting.is_cancelled():
                with contextlib.suppress(
                    OSError
                ):  # the reply is already on its way, or the daemon is shutting down
                    channel.send(self._socket, encode(Cancel()))
                continue
            if on_descriptors:
                reply = self._after_descriptors(on_descriptors)
                on_descriptors = None
            else:
                reply = self._receive()
            if isinstance(reply, OutputChunk) and on_output:
                on_output(reply.stream, reply.data)
            elif reply is not None:
                self._used_at = time.monotonic()
                return reply

    def ask_for_descriptor(self, request: msgspec.Struct) -> tuple[msgspec.Struct, int]:
        """Send a request; return its reply with its descriptor, or a Failure and -1."""
        self._send(_encoded(request, self._welcome.request_bytes))
        reply, descriptors = self._receive_with_descriptors()
        if len(descriptors) != (0 if isinstance(reply, Failure) else 1):
            for each in descriptors:
                os.close(each)
            raise ClosedError(f"invalid descriptors from {self._server}")
        self._used_at = time.monotonic()
        return reply, descriptors[0] if descriptors else -1

    def is_good(self) -> bool:
        """Tell whether it can carry another request: the daemon has not closed it and will not soon."""
        recent = time.monotonic() - self._used_at < _IDLE_SECONDS
        return recent and not self._news.poll(0)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _greet(self, policy: str) -> Welcome:
        self._send(encode(Hello(VERSION, policy[:1024])))
        if not channel.has_news(self._socket.fileno(), CONNECT_SECONDS):
            raise LaunchError(f"{self._server} does not answer")
        reply = self._receive()
        if isinstance(reply, Failure):
            raise error_of(reply)
        if not isinstance(reply, Welcome):
            raise LaunchError(f"{self._server} is not of this version")
        return reply

    def _send(self, frame: bytes) -> None:
        try:
            channel.send(self._socket, frame)
        except BlockingIOError:  # SO_SNDTIMEO
            raise BusyError(
                f"{self._server} does not read: no packet taken within {_SEND_SECONDS} s"
            ) from None
        except OSError:  # the daemon closed the connection; its reason is still to be read
            return

    def _after_descriptors(self, on_descriptors: OnDescriptors) -> msgspec.Struct | None:
        reply, descriptors = self._receive_with_descriptors()
        if descriptors:
            on_descriptors(reply, descriptors)
        return None if descriptors else reply

    def _receive_with_descriptors(self) -> tuple[msgspec.Struct, list[int]]:
        try:
            frame, descriptors = channel.receive_with_descriptors(self._socket)
        except (channel.ProtocolError, OSError) as error:
            raise ClosedError(f"invalid frame from {self._server}: {error}") from None
        try:
            return reply_of(frame, self._server, self._replies), descriptors
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise

    def _receive(self) -> msgspec.Struct | None:
        try:
            frame = self._packet()
        except channel.ProtocolError as error:
            raise ClosedError(f"invalid frame from {self._server}: {error}") from None
        return None if frame is None else reply_of(frame, self._server, self._replies)

    def _packet(self) -> bytes | None:
        for _ in range(
            2
        ):  # the first may be ECONNRESET for data the daemon did not read; its frame follows
            try:
                return self._receiver.receive()
            except ConnectionError:
                pass
        return b""


class _ReplyWait:
    """Waits for the daemon's next packet or for the caller to cancel; a second cancel is ignored."""

    def __init__(self, sock: _socket.socket, cancel: int) -> None:
        self._cancel = cancel
        self._deadline: float | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(cancel, select.POLLIN)

    def is_cancelled(self) -> bool:
        """Wait for either; tell whether it was the cancel.  Raises ClosedError if no packet follows a
        cancel."""
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
        check_length_of_frame(len(frame), most)
    return frame


def check_length_of_frame(length: int, most: int) -> None:
    """Raise PolicyError for a frame that is longer than those that the daemon reads."""
    if length > most:
        raise PolicyError(
            f"connect: the arguments take {length} bytes, the daemon takes at most {most}"
        )


def reply_of(frame: bytes, server: str, replies: Any = Reply) -> msgspec.Struct:
    """Return the reply in a frame, b"" at the end of the connection; raises ClosedError."""
    if not frame:
        raise ClosedError(f"{server} closed the connection")
    try:
        reply: msgspec.Struct = decode(frame, replies)
    except msgspec.DecodeError as error:
        raise _UnknownFrameError(f"invalid frame from {server}: {error}") from None
    return reply


def daemon_connections(path: str, policy: str) -> ConnectionPool:
    """Return the connections to the daemon that listens at `path`."""
    name = check_length(path)
    return ConnectionPool(partial(_connected, name), policy, f"the daemon at {name}")


def _connected(path: str) -> _socket.socket:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        # connect(2) waits while the queue of connections is full (unix(7)); SO_SNDTIMEO bounds that
        # wait, and the wait for a slow reader.
        patience = struct.pack("ll", CONNECT_SECONDS, 0)
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


_R = TypeVar("_R", bound=msgspec.Struct)


class Requests:
    """Requests to one daemon; safe from many threads, as its connections are."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        reply = self.pool.ask(request, on_output, cancel)
        if not isinstance(reply, kind):
            raise InternalError(f"the daemon answered with {type(reply).__name__}")
        return reply

    def hold(self, request: msgspec.Struct) -> tuple[msgspec.Struct, int, Callable[[], None]]:
        """Do what `hold` of the pool does."""
        return self.pool.hold(request)

    def execute(self, given: CallArguments, limits: Limits, session: str = "") -> SandboxResult:
        request = packed(given, limits, session, stream=given.on_output is not None)
        return result_of(self.ask(request, Executed, given.on_output, given.cancel))

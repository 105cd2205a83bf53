"""The daemon's event loop: connections, requests, and shutdown.

One thread accepts connections (listener.py), assembles frames and keeps every deadline; it never waits
for a client.  A complete request goes to a thread of its own together with its connection, which comes
back to the loop when the reply was sent.
"""

import collections
import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ....policies.errors import BusyError, CellwrightError, PolicyError
from ....runner import channel
from ....runner.messages import decode
from ...sandbox.remote.failures import failure_of
from ...sandbox.remote.frames import VERSION, Cancel, ClientRequest, Hello, Welcome
from .connection import ClientConnection
from .limits import ClientQuotas, ServeLimits
from .listener import ClientListener
from .service import Service

_LAST_SECONDS = 5.0  # from cancelling the running requests to ending their cells
_NEVER = float("inf")
_SERVING, _DRAINING, _CANCELLING, _OVER = range(4)


class Server:
    """Serves until `stop` is called, then closes its services."""

    def __init__(
        self, listener: socket.socket, services: Mapping[str, Service],
        limits: ServeLimits = ServeLimits(), drain_seconds: float = 10.0,  # noqa: B008 - a constant
    ) -> None:  # fmt: skip
        """`services` by the name of their policy; the first is the default."""
        self._services = services
        self._limits = limits
        self._drain_seconds = drain_seconds
        self._connections: dict[int, ClientConnection] = {}  # all of them, by descriptor
        self._running: dict[int, ClientConnection] = {}  # those that a thread owns
        self._returned: collections.deque[ClientConnection] = collections.deque()
        self._wake, self.waker = os.pipe2(
            os.O_CLOEXEC | os.O_NONBLOCK
        )  # signal handlers may write to it
        self._threads = ThreadPoolExecutor(limits.running, "cellwright-serve")
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._listener = ClientListener(listener, self._poll, ClientQuotas(limits), limits)
        self._stops = 0  # calls of `stop`
        self._stage = _SERVING
        self._deadline = _NEVER  # of the stage

    def stop(self) -> None:
        """Stop accepting, and end after the running requests; a second call cancels them.

        For signal handlers and other threads.
        """
        self._stops += 1
        self._wake_loop()

    def run(self) -> None:
        """Serve until stopped; on return every connection is closed and every thread has ended."""
        listener = self._listener.fileno()
        try:
            while self._stage < _OVER:
                for descriptor, _ in self._poll.poll(self._poll_timeout_ms()):
                    if descriptor == self._wake:
                        self._take_returned()
                    elif descriptor == listener:
                        self._accept()
                    elif connection := self._connections.get(descriptor):
                        self._receive(connection)
                self._keep_deadlines()
        finally:
            self._end()

    # requests

    def _accept(self) -> None:
        for connection in self._listener.accept():
            self._connections[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN)

    def _receive(self, connection: ClientConnection) -> None:
        try:
            frame = connection.receive()
            if frame == b"":
                self._forget(connection)
            elif frame and connection.service:
                self._begin(connection, frame)
            elif frame:
                self._greet(connection, frame)
        except (channel.ProtocolError, msgspec.DecodeError) as error:
            self._refuse(connection, PolicyError(f"invalid frame: {error}"))
        except CellwrightError as error:
            self._refuse(connection, error)

    def _greet(self, connection: ClientConnection, frame: bytes) -> None:
        hello: Hello = decode(frame, Hello)
        if hello.version != VERSION:
            raise PolicyError(
                f"the daemon has version {VERSION} of the protocol, the client {hello.version}",
                "install the same version of cellwright on both sides",
            )
        name = hello.policy or next(iter(self._services))
        if name not in self._services:
            raise PolicyError(
                f"policy: {name!r} is not one of the daemon's: {', '.join(self._services)}"
            )
        connection.welcome(self._services[name])
        connection.tell_at_once(Welcome(VERSION, os.getpid(), self._limits.request_bytes))

    def _begin(self, connection: ClientConnection, frame: bytes) -> None:
        """Hand a request to a thread, or refuse it."""
        try:
            connection.begin()
        except BusyError as error:
            if not connection.tell_at_once(failure_of(error)):
                self._forget(connection)
            return
        self._poll.unregister(connection)
        self._running[connection.fileno()] = connection
        with contextlib.suppress(
            RuntimeError
        ):  # no thread could be started: the request waits for one
            self._threads.submit(self._work, connection, frame)

    # in a thread

    def _work(self, connection: ClientConnection, frame: bytes) -> None:
        try:
            reply = _reply_to(connection, frame)
            if reply is not None:
                connection.tell(reply, last=True)
        finally:
            self._returned.append(connection)
            self._wake_loop()

    def _take_returned(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._returned:
            connection = self._returned.popleft()
            del self._running[connection.fileno()]
            connection.rest()
            if self._stage == _SERVING:
                self._poll.register(connection, select.POLLIN)
            else:
                self._forget(connection)

    # shutdown

    def _refuse(self, connection: ClientConnection, error: CellwrightError) -> None:
        connection.tell_at_once(failure_of(error))
        self._forget(connection)

    def _forget(self, connection: ClientConnection) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()

    def _poll_timeout_ms(self) -> float | None:
        deadlines = [each.deadline for each in self._connections.values()]
        next_look = min((self._deadline, self._listener.deadline, *deadlines))
        if next_look == _NEVER:
            return None
        return max(0.0, next_look - time.monotonic()) * 1000 + 1

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._connections.values() if each.deadline <= now]:
            self._refuse(connection, BusyError("the client took too long to send a request"))
        self._listener.keep_deadline(now)
        if self._stops:
            self._stop(now)

    def _stop(self, now: float) -> None:
        """Drain: let running requests finish; then cancel them and send their results; then end their
        cells."""
        if self._stage == _SERVING:
            self._drain(now)
        if self._stage == _DRAINING and (self._stops > 1 or now >= self._deadline):
            self._stage, self._deadline = _CANCELLING, now + _LAST_SECONDS
            for connection in self._running.values():
                connection.hang_up()
        if not self._running or (self._stage == _CANCELLING and now >= self._deadline):
            self._stage = _OVER

    def _drain(self, now: float) -> None:
        self._stage, self._deadline = _DRAINING, now + self._drain_seconds
        self._listener.close()
        for connection in [*self._connections.values()]:
            if connection.fileno() not in self._running:
                self._forget(connection)

    def _end(self) -> None:
        """Close everything; threads that wait for a client that does not read stop waiting."""
        self._listener.close()
        for connection in self._connections.values():
            connection.cut()
        for service in self._services.values():
            service.close()
        self._threads.shutdown()
        for connection in self._connections.values():
            connection.close()
        for end in (self._wake, self.waker):
            os.close(end)
        self._wake = self.waker = -1

    def _wake_loop(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            os.write(self.waker, b"\0")


def _reply_to(connection: ClientConnection, frame: bytes) -> msgspec.Struct | None:
    """Return the reply; None for a Cancel that came too late."""
    try:
        request = decode(frame, ClientRequest)
    except msgspec.DecodeError as error:
        connection.hang_up()
        return failure_of(PolicyError(f"invalid frame: {error}"))
    if isinstance(request, Cancel):
        return None
    assert connection.service  # noqa: S101 - set by the greeting, before any request
    try:
        return connection.service.answer(request, connection)
    except Exception as error:  # noqa: BLE001 - reported to the client; bugs also to stderr
        return failure_of(error)

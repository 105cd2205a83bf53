"""`PortRelay`: the one thread that carries bytes between sockets of the host and servers in cells."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ....policies.errors import CellwrightError, ClosedError
from ....runner.cell_network import CellNetwork, answered
from ....runner.threads import begin
from .connection import Connection, PortLimits, Side

_LOOK_SECONDS = 1.0  # at what has expired
# A cell that sends byte by byte could keep this thread busy: beyond so many turns a second it rests.
_TURNS_A_SECOND = 10_000
_REST_SECONDS = 0.02


class CellUse(Protocol):
    """A cell that stands still while it is not used."""

    def begin_use(self) -> None:
        """Let it go on until `end_use`; raises CellwrightError if it has ended."""

    def end_use(self) -> None: ...


class RelayedPort:
    """A listening socket of the host, and the port of a cell that its connections lead to."""

    def __init__(
        self, listener: socket.socket, port: int, network: CellNetwork, limits: PortLimits,
        use: CellUse | None = None,
    ) -> None:  # fmt: skip
        """Each connection uses the cell, if `use` is given, as long as it is open."""
        self.listener = listener
        self.port = port
        self.network = network
        self.limits = limits
        self.use = use
        self.connections: set[Connection] = set()
        self.is_accepting = False


class PortRelay:
    """Accepts connections and carries their bytes in a thread of its own; safe from many threads.

    What the thread holds is guarded by a lock, which it does not hold while it asks a launcher for a
    socket: `close_port` may be called by a thread that holds the locks of sessions.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Reentrant: a finalizer may close a sandbox in a thread that holds it.
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ports: dict[int, RelayedPort] = {}  # by the listener's descriptor
        self._waiting: dict[int, tuple[RelayedPort, Connection, socket.socket]] = {}  # for a socket
        self._sides: dict[int, tuple[RelayedPort, Connection, Side]] = {}
        self._closed = False
        self._turns, self._counted_since = 0, clock()
        self._look_at = 0.0
        try:
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = begin("cellwright-ports", self._run)
        except BaseException:
            self._epoll.close()
            os.close(self._wake)
            raise

    def open_port(self, port: RelayedPort) -> None:
        """Accept connections of `port` from now on; raises ClosedError."""
        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            self._ports[port.listener.fileno()] = port
            self._accept_while_there_is_room(port)

    def close_port(self, port: RelayedPort) -> None:
        """Close its listener and its connections; closing twice is fine.

        A forked child has no such thread, and only copies of the sockets: there this does nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._close_port(port)

    def close(self) -> None:
        """Close every port, and end the thread."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for port in tuple(self._ports.values()):
                self._close_port(port)
            os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _close_port(self, port: RelayedPort) -> None:
        if self._ports.pop(port.listener.fileno(), None):
            self._refuse(port)
            port.listener.close()
            for connection in tuple(port.connections):
                self._drop(port, connection)

    def _run(self) -> None:
        while not self._closed:
            events = self._epoll.poll(_LOOK_SECONDS)
            with self._lock:
                accepted = [each for number, event in events for each in self._turn(number, event)]
                self._drop_expired()
            for port, connection in accepted:
                self._ask(port, connection)
            self._rest_if_busy()
        with self._lock:
            self._epoll.close()
            os.close(self._wake)

    def _rest_if_busy(self) -> None:
        self._turns += 1
        now = self._clock()
        if now - self._counted_since >= _LOOK_SECONDS:
            self._turns, self._counted_since = 0, now
        elif self._turns > _TURNS_A_SECOND * max(now - self._counted_since, _REST_SECONDS):
            rest = select.poll()
            rest.register(self._wake, select.POLLIN)
            rest.poll(_REST_SECONDS * 1000)

    def _turn(self, number: int, event: int) -> Iterable[tuple[RelayedPort, Connection]]:
        """Do what an event is about; return connections that need a socket in their cells."""
        if port := self._ports.get(number):
            return self._accept(port)
        if waiting := self._waiting.get(number):
            self._connect(number, *waiting)
        elif found := self._sides.get(number):
            port, connection, side = found
            side.note(event)
            self._advance(port, connection)
        return ()

    def _accept(self, port: RelayedPort) -> Iterable[tuple[RelayedPort, Connection]]:
        try:
            client, _ = port.listener.accept()
        except BlockingIOError:
            return ()
        except OSError:  # no descriptor is free: until `_drop_expired` looks again
            self._refuse(port)
            return ()
        client.setblocking(False)
        connection = Connection(client, port.limits, self._clock())
        port.connections.add(connection)
        self._watch(port, connection)
        self._accept_while_there_is_room(port)
        return ((port, connection),)

    def _ask(self, port: RelayedPort, connection: Connection) -> None:
        """Ask for a socket in the cell; without the lock, since a launcher may take its time."""
        try:
            if port.use:
                port.use.begin_use()
                connection.uses_cell = True
            answer = port.network.ask()
        except (CellwrightError, OSError):
            with self._lock:
                self._drop(port, connection)
                _end_use(port, connection)
            return
        with self._lock:
            if connection not in port.connections:  # it was closed meanwhile
                answer.close()
                _end_use(port, connection)
                return
            self._waiting[answer.fileno()] = port, connection, answer
            self._epoll.register(answer, select.EPOLLIN)

    def _connect(
        self, number: int, port: RelayedPort, connection: Connection, answer: socket.socket
    ) -> None:
        """Connect the socket that has come."""
        self._forget_answer(number)
        try:
            made = answered(answer)
        except (CellwrightError, OSError):
            self._drop(port, connection)
            return
        finally:
            answer.close()
        if connection.connect(made, port.port):
            self._advance(port, connection)
        else:
            self._drop(port, connection)

    def _advance(self, port: RelayedPort, connection: Connection) -> None:
        if connection.advance(self._clock()):
            self._watch(port, connection)
        else:
            self._drop(port, connection)

    def _watch(self, port: RelayedPort, connection: Connection) -> None:
        """Have the kernel report what each side of the connection waits for."""
        for side in connection.sides():
            events = connection.wanted(side)
            if side.is_gone:
                self._unwatch(side)
            elif not side.is_watched:
                self._sides[side.number] = port, connection, side
                self._epoll.register(side.number, events)
                side.is_watched, side.events = True, events
            elif side.events != events:
                self._epoll.modify(side.number, events)
                side.events = events

    def _unwatch(self, side: Side) -> None:
        if side.is_watched:
            side.is_watched = False
            del self._sides[side.number]
            self._epoll.unregister(side.number)

    def _drop(self, port: RelayedPort, connection: Connection) -> None:
        if connection not in port.connections:
            return
        port.connections.discard(connection)
        for number, (_, waiting, answer) in tuple(self._waiting.items()):
            if waiting is connection:
                self._forget_answer(number)
                answer.close()
        for side in connection.sides():
            self._unwatch(side)
        connection.close()
        _end_use(port, connection)
        self._accept_while_there_is_room(port)

    def _forget_answer(self, number: int) -> None:
        del self._waiting[number]
        self._epoll.unregister(number)

    def _drop_expired(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for port in tuple(self._ports.values()):
            for connection in [each for each in port.connections if each.expires_at() <= now]:
                self._drop(port, connection)
            self._accept_while_there_is_room(port)

    def _accept_while_there_is_room(self, port: RelayedPort) -> None:
        number = port.listener.fileno()
        if number not in self._ports:
            return
        if len(port.connections) >= port.limits.connections:
            self._refuse(port)
        elif not port.is_accepting:
            port.is_accepting = True
            self._epoll.register(number, select.EPOLLIN)

    def _refuse(self, port: RelayedPort) -> None:
        if port.is_accepting:
            port.is_accepting = False
            with contextlib.suppress(OSError):
                self._epoll.unregister(port.listener.fileno())


def _end_use(port: RelayedPort, connection: Connection) -> None:
    """Note, once, that the connection does not use the cell any more."""
    if port.use and connection.uses_cell:
        connection.uses_cell = False
        port.use.end_use()

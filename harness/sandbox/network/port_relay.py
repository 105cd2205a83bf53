"""`PortRelay`: the one thread that carries bytes between sockets of the host and servers in cells.

`Connection`: one connection from the host to a server in a cell, and the bytes in between.

The server is hostile. Each direction holds at most one unread chunk and reads no more until it is sent.
So a side that does not read stops the other one, and costs one chunk.
"""

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ....policies.errors import CellwrightError, ClosedError
from ....runner.cells.cell_network import CellNetwork, answered
from ....runner.concurrency import begin_thread
from ....runner.sessions.session_cell import SessionCell

CHUNK_BYTES = 64 * 1024
_UNDER_WAY = (0, errno.EINPROGRESS)
# Where servers listen, in the order that browsers try. The kernel connects a socket of IPv6 that was
# refused at ::1 to a mapped address, but not the other way round (tried).
_LOOPBACK = {
    socket.AF_INET: ("127.0.0.1",), socket.AF_INET6: ("::1", "::ffff:127.0.0.1"),
}  # fmt: skip
_GONE = select.EPOLLHUP | select.EPOLLERR


class PortLimits(NamedTuple):
    """The limits of the connections to one port."""

    connections: int = 64  # concurrent connections; further ones wait in the kernel's short queue
    connect_seconds: float = 10.0  # time for the cell to accept; a frozen cell is thawed first
    idle_seconds: float = 600.0  # seconds without a byte in either direction
    half_closed_seconds: float = 60.0  # the same after one side has ended its stream


class Side:
    """One end of a connection: its socket and the events that the poll loop waits for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.events = 0
        self.is_watched = False
        self.is_gone = False  # unwatched, because the kernel reports its end again and again

    def note(self, event: int) -> None:
        self.is_gone = self.is_gone or bool(event & _GONE)


class _Flow:
    """The bytes from one side to the other."""

    def __init__(self, source: Side, sink: Side) -> None:
        self._source = source
        self._sink = sink
        self._pending = memoryview(b"")
        self._ended = False
        self.is_done = False

    @property
    def is_blocked(self) -> bool:
        """Tell whether it waits for its sink."""
        return bool(self._pending)

    @property
    def reads(self) -> bool:
        """Tell whether it waits for its source."""
        return not (self._ended or self._pending)

    def move(self) -> int:
        """Carry at most one chunk as far as it goes without waiting; return how many bytes moved."""
        moved = self._read() if self.reads else 0
        if self._pending:
            moved += self._write()
        if self._ended and not self._pending and not self.is_done:
            self.is_done = True
            with contextlib.suppress(OSError):  # the connection has ended already
                self._sink.sock.shutdown(socket.SHUT_WR)
        return moved

    def _read(self) -> int:
        try:
            chunk = self._source.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a reset is an end
            chunk = b""
        self._pending = memoryview(chunk)
        self._ended = not chunk
        return len(chunk)

    def _write(self) -> int:
        try:
            sent = self._sink.sock.send(self._pending)
        except BlockingIOError:
            return 0
        except OSError:  # the sink accepts no more; its own data is still carried
            self._pending = memoryview(b"")
            self._ended = True
            return 0
        self._pending = self._pending[sent:]
        return sent


class Connection:
    """A client of the host, and the socket in the cell once there is one."""

    def __init__(self, client: socket.socket, limits: PortLimits, now: float) -> None:
        self.client = Side(client)
        self.uses_cell = False
        self.guest: Side | None = None  # None until the launcher has made its socket
        self._limits = limits
        self._flows: tuple[_Flow, ...] = ()  # none until the cell has accepted
        self._addresses: list[tuple[str, int]] = []  # each is tried if the one before refuses
        self._moved_at = now

    def sides(self) -> tuple[Side, ...]:
        return (self.client, self.guest) if self.guest else (self.client,)

    def connect(self, sock: socket.socket, port: int) -> bool:
        """Connect `sock`, of the cell's namespace, to its server; tell whether that may work."""
        self.guest = Side(sock)
        self._addresses = [(address, port) for address in _LOOPBACK[sock.family]]
        return self._connect_to_next(self.guest)

    def _connect_to_next(self, guest: Side) -> bool:
        while self._addresses:
            address = self._addresses.pop(0)
            error = guest.sock.connect_ex(address)
            if (
                error == errno.ECONNABORTED
            ):  # the error is of the address before (connect(2) in net/ipv4)
                error = guest.sock.connect_ex(address)
            if error in _UNDER_WAY:
                guest.is_gone = False  # the kernel reported the end of the attempt before
                return True
        return False

    def advance(self, now: float) -> bool:
        """Do all work that needs no waiting; return False once the connection is over."""
        guest = self.guest
        if guest is None:
            return True
        if not self._flows:
            if guest.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return self._connect_to_next(guest)  # no server listens, or the cell has ended
            if not _is_connected(guest.sock):
                return True
            self._flows = _Flow(self.client, guest), _Flow(guest, self.client)
            self._moved_at = now
        # A closed side causes no more events, so its remaining data, one socket buffer, is carried now.
        while sum(flow.move() for flow in self._flows):
            self._moved_at = now
            if not any(side.is_gone for side in self.sides()):
                break
        if self.client.is_gone and self._flows[0].is_done:
            return False  # a client with a closed socket receives nothing more from the guest
        return not all(flow.is_done for flow in self._flows)

    def wanted(self, side: Side) -> int:
        """Return the events of `side` that it waits for."""
        if not self._flows:
            return select.EPOLLOUT if side is self.guest else 0
        out, back = self._flows if side is self.client else reversed(self._flows)
        events = select.EPOLLIN if out.reads else 0
        return events | (select.EPOLLOUT if back.is_blocked else 0)

    def expires_at(self) -> float:
        limits = self._limits
        if not self._flows:
            return self._moved_at + limits.connect_seconds
        half_closed = any(flow.is_done for flow in self._flows)
        return self._moved_at + (limits.half_closed_seconds if half_closed else limits.idle_seconds)

    def close(self) -> None:
        for side in self.sides():
            side.sock.close()


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


_LOOK_SECONDS = 1.0  # pause between two checks for expired connections
# Turns a second after which a connection rests, because a cell that sends single bytes could keep this
# thread busy.
_TURNS_A_SECOND = 10_000
_REST_SECONDS = 0.02


class RelayedPort:
    """A listening socket of the host, and the port of a cell that its connections lead to."""

    def __init__(
        self, listener: socket.socket, port: int, network: CellNetwork, limits: PortLimits,
        use: SessionCell | None = None,
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

    A lock guards the thread's state. The thread does not hold it while it asks a launcher for a socket,
    because `close_port` may be called by a thread that holds the locks of sessions.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Reentrant: a finalizer may close a sandbox in a thread that holds it.
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ports: dict[int, RelayedPort] = {}  # by the listener's descriptor
        # connections that wait for a socket
        self._waiting: dict[int, tuple[RelayedPort, Connection, socket.socket]] = {}
        self._sides: dict[int, tuple[RelayedPort, Connection, Side]] = {}
        self._closed = False
        self._turns, self._counted_since = 0, clock()
        self._look_at = 0.0
        try:
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = begin_thread("cellwright-ports", self._run)
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
        """Handle an event; return connections that need a socket in their cells."""
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
        except OSError:  # out of descriptors: pause until `_drop_expired` runs
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

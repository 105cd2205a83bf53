"""`Connection`: one connection from the host to a server in a cell, and the bytes in between.

The server is hostile.  Each direction holds at most one chunk of what the other side has not taken, and
reads no more until that is gone, so a side that does not read stops the other, and costs a chunk.
"""

import contextlib
import errno
import select
import socket
from typing import NamedTuple

CHUNK_BYTES = 64 * 1024
_UNDER_WAY = (0, errno.EINPROGRESS)
_GONE = select.EPOLLHUP | select.EPOLLERR


class PortLimits(NamedTuple):
    """What the connections to one port may take."""

    connections: int = 64  # at once; further ones wait in the kernel's queue, which is short
    connect_seconds: float = 10.0  # for the cell to accept; a frozen one is thawed first
    idle_seconds: float = 600.0  # without a byte in either direction
    half_closed_seconds: float = 60.0  # the same, once one side has said that it sends no more


class Side:
    """One end of a connection: its socket, and what the poll loop waits for there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.events = 0
        self.is_watched = False
        self.is_gone = False  # the kernel reports its end over and over, so it is not watched

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
            with contextlib.suppress(OSError):  # it has ended already
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
        except OSError:  # the sink takes no more; what it has sent is still carried
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
        self._moved_at = now

    def sides(self) -> tuple[Side, ...]:
        return (self.client, self.guest) if self.guest else (self.client,)

    def connect(self, sock: socket.socket, port: int) -> bool:
        """Connect `sock`, of the cell's namespace, to its server; tell whether that may work."""
        self.guest = Side(sock)
        return sock.connect_ex(("127.0.0.1", port)) in _UNDER_WAY

    def advance(self, now: float) -> bool:
        """Do what can be done without waiting; return False once the connection is over."""
        guest = self.guest
        if guest is None:
            return True
        if not self._flows:
            if guest.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return False  # no server listens, or the cell has ended
            if not _is_connected(guest.sock):
                return True
            self._flows = _Flow(self.client, guest), _Flow(guest, self.client)
            self._moved_at = now
        # A side that is gone gives no more events: what it left, a socket buffer, is carried now.
        while sum(flow.move() for flow in self._flows):
            self._moved_at = now
            if not any(side.is_gone for side in self.sides()):
                break
        if self.client.is_gone and self._flows[0].is_done:
            return (
                False  # a client that has closed its socket takes nothing that the guest still says
            )
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

"""Doors: sockets for tool calls by programs that cannot read packets, such as shells.

The program opens the path DOOR, which no file has.  The kernel reports every open to the supervisor,
and the supervisor answers this one with a new stream socket (seccomp_unotify(2),
SECCOMP_IOCTL_NOTIF_ADDFD).  Each socket takes one call and returns its answer, so that processes that
call at the same time, or die in a call, do not disturb each other.  The supervisor reads the path from
the guest's memory; a guest that changes the path meanwhile gains a socket that it could have asked for.

Input from a door is hostile: its size is limited before it is joined, it is parsed once, and a second
call on the same socket ends the cell.
"""

import _socket  # as in channel.py
import contextlib
import errno
import os
import select
import threading
from collections import deque
from functools import partial

from ..channel import PACKET_BYTES, ProtocolError
from ..kernel import notifications
from ..kernel.notifications import Notification
from ..messages import Answer, Call
from .calls import Calls
from .giver import Give
from .guest_channel import MOST_UNSENT_BYTES, dropped
from .listener import DOOR
from .poll_loop import Watcher

_AT_ONCE = 32  # the guest's own limit of concurrent calls on the control channel
_MOST_WAITING = 256  # a cell may have so many processes, each in an open(2); dead ones are removed
_NOW = int(_socket.MSG_DONTWAIT)
_SHORT = PACKET_BYTES // 4  # bytes of a value, characters of a message
_TEXTS = 3  # site, name and arguments; a NUL, which JSON cannot hold, ends each


class _Door:
    """An open door: `socket` until one side closes it, `asked` once the call is complete."""

    def __init__(self, number: int, sock: _socket.SocketType) -> None:
        self.number = number
        self.socket: _socket.SocketType | None = sock
        self.hears = True  # until the guest has closed its sending side
        self.heard = bytearray()
        self.texts = 0
        self.asked = False
        self.left = memoryview(b"")  # of the answer


class Doors:
    """The doors of one request."""

    def __init__(
        self, listener: int, most_bytes: int, calls: Calls, watcher: Watcher, give: Give
    ) -> None:
        self._listener = listener
        self._give = give
        self._most_bytes = most_bytes
        self._calls = calls
        self._watcher = watcher
        self._count = 0
        self._open: dict[int, _Door] = {}  # by the number of the call, which is below 0
        self._waiting: deque[tuple[Notification, int]] = deque()
        self._kept: deque[tuple[Answer, memoryview | None]] = deque()
        self._sending = threading.Lock()  # held while another thread may send to a door

    def open_door(self, notification: Notification, flags: int) -> None:
        """Open a door for a process, whose open(2) blocks until there is room."""
        if len(self._waiting) >= _MOST_WAITING:
            living = (each for each in self._waiting if self._is_waiting(each[0]))
            self._waiting = deque(living)
        if len(self._waiting) >= _MOST_WAITING:
            notifications.refuse(self._listener, notification, errno.EAGAIN)
            return
        self._waiting.append((notification, flags))
        self._let_in()

    def answer(self, answer: Answer) -> bool:
        """Send a short answer from any thread, and queue what is left of it for the poll loop, which
        hangs up; returns whether there is something for it to do."""
        left, door = None, self._open.get(answer.number)
        if door is None:  # all doors were closed
            return False
        if len(answer.value or answer.message) <= _SHORT:
            text = _text_of(answer)
            # OSError: the poll loop sends it later, or drops it.
            with self._sending, contextlib.suppress(OSError):
                left = text[door.socket.send(text, _NOW) :] if door.socket else None
        self._kept.append((answer, left))
        return True

    def send_kept(self) -> None:
        """Send what is left of answers; an answer whose process has closed its door is dropped."""
        while self._kept:
            answer, left = self._kept.popleft()
            door = self._open[answer.number]
            door.left = self._whole(answer) if left is None else left
            self._send(door)

    def _whole(self, answer: Answer) -> memoryview:
        unsent = sum(len(each.left) for each in self._open.values())
        if unsent and unsent + len(answer.value or b"") > MOST_UNSENT_BYTES:
            answer = dropped(answer)
        return _text_of(answer)

    def close(self) -> None:
        """Close all doors and refuse waiting processes."""
        for notification, _ in self._waiting:
            notifications.refuse(self._listener, notification, errno.ENXIO)
        self._waiting.clear()
        for door in self._open.values():
            self._hang_up(door)
        self._open.clear()

    def _is_waiting(self, notification: Notification) -> bool:
        return notifications.is_waiting(self._listener, notification)

    def _let_in(self) -> None:
        while self._waiting and len(self._open) < _AT_ONCE:
            self._let_in_one(*self._waiting.popleft())

    def _let_in_one(self, notification: Notification, flags: int) -> None:
        try:
            ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        except OSError:  # this process has no descriptor left
            notifications.refuse(self._listener, notification, errno.EAGAIN)
            return
        self._count += 1
        door = self._open[-self._count] = _Door(-self._count, ours)
        self._watch(door)
        # Where the process does not get it, it is closed, and the door hears of that.
        self._give(notification, theirs.detach(), flags & os.O_CLOEXEC)

    def _watch(self, door: _Door) -> None:
        """Watch for the next possible events; poll(2) reports a closed end in any case."""
        if door.socket:
            events = (select.POLLIN if door.hears else 0) | (select.POLLOUT if door.left else 0)
            self._watcher.watch(door.socket.fileno(), events, partial(self._on_event, door))

    def _on_event(self, door: _Door, event: int) -> None:
        if door.left and event & select.POLLOUT:
            self._send(door)
        if door.socket and door.hears and event & ~select.POLLOUT:
            try:
                self._receive(door, door.socket)
            except ProtocolError as error:
                self._watcher.complain(f"broke the protocol of {DOOR}: {error}")
        if event & select.POLLHUP and not door.hears:
            self._hang_up(door)

    def _receive(self, door: _Door, sock: _socket.SocketType) -> None:
        try:
            data = sock.recv(PACKET_BYTES, _NOW)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            self._hear(door, data)
            return
        door.hears = False
        self._watch(door)  # it may have closed only its sending side, and wait for the answer
        if not door.asked:
            self._hang_up(door)
            self._forget(door)

    def _hear(self, door: _Door, data: bytes) -> None:
        if sum(len(each.heard) for each in self._open.values()) + len(data) > self._most_bytes:
            raise ProtocolError(f"calls of more than {self._most_bytes} bytes together")
        door.texts += data.count(b"\0")
        if door.asked or door.texts > _TEXTS:
            raise ProtocolError("more than one call")
        door.heard += data
        if door.texts == _TEXTS:
            self._ask(door)

    def _ask(self, door: _Door) -> None:
        site, name, arguments, rest = bytes(door.heard).split(b"\0")
        if rest:
            raise ProtocolError("more than one call")
        door.asked, door.heard = True, bytearray()
        texts = (name.decode(errors="replace"), arguments, site.decode(errors="replace"))
        self._calls.begin(Call(door.number, *texts))

    def _send(self, door: _Door) -> None:
        try:
            while door.socket and door.left:
                door.left = door.left[door.socket.send(door.left, _NOW) :]
        except BlockingIOError:
            self._watch(door)
            return
        except OSError:  # the calling process has closed its end
            pass
        self._calls.sent(door.number)
        self._hang_up(door)
        self._forget(door)

    def _hang_up(self, door: _Door) -> None:
        if door.socket:
            self._watcher.unwatch(door.socket.fileno())
            with self._sending:
                door.socket.close()
                door.socket = None

    def _forget(self, door: _Door) -> None:
        """Free the place of a door; a call keeps its place until it is answered."""
        del self._open[door.number]
        self._let_in()


def _text_of(answer: Answer) -> memoryview:
    text = answer.message.encode(errors="replace") if answer.kind else answer.value or b"null"
    return memoryview(b"%b\n%b\n" % (answer.kind.encode(), text))

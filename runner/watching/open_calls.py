"""The open tool calls of one program.  Each has a thread of its own, so that the poll loop that watches
the program never waits for a tool."""

import _socket  # as in channel.py
import contextlib
import errno
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..channel import PACKET_BYTES, ProtocolError, name_for_good
from ..concurrency import begin_thread
from ..kernel import notifications
from ..kernel.notifications import Notification
from ..listening.cell_listener import DOOR
from ..listening.waiting_call import Give
from ..messages import Answer, Call
from .guest_channel import MOST_UNSENT_BYTES, Watcher, dropped

Tell = Callable[[Answer], None]
# Must not raise. It passes its answer to Tell as its last action, or no answer if the program is being
# stopped. Answers reach the program in the order in which they are passed.
OnCall = Callable[[Call, Tell], None]
_MOST_OPEN = 64
_IDLE_SECONDS = 3.0
_MOST_ORPHANS = 64  # for each caller, as many as one program may have open
_MOST_ORPHANS_IN_ALL = 512  # in this process: each holds a thread


class Orphans:
    """Counts one caller's tool calls that outlive their programs.

    A tool cannot be ended from outside, and each holds a thread: without a bound, programs that call
    and end at once would pile up threads.  Safe from many threads.
    """

    _lock = threading.Lock()
    _in_all = 0

    def __init__(self) -> None:
        self._count = 0

    def add(self, change: int) -> None:
        with Orphans._lock:
            self._count += change
            Orphans._in_all += change

    def is_full(self) -> bool:
        """Return whether further calls are refused until some of these tools have ended."""
        return self._count >= _MOST_ORPHANS or Orphans._in_all >= _MOST_ORPHANS_IN_ALL

    @classmethod
    def forget(cls) -> None:
        """Reset the counts: the child of a fork has none of the threads."""
        cls._lock, cls._in_all = threading.Lock(), 0


class CallTurn(Protocol):
    """The turn to read the control channel (call_router.py)."""

    def wait(self) -> Call | None: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


class Calls:
    """The tool calls of one execution.

    `tell` sends an answer and returns whether a part is left to send; then `ready` becomes readable.
    `orphans` counts the calls that outlive the execution.  `settle` returns once `sent` was called for
    every answer that the guest may have read.  `turn` lets the thread of an answered call wait for the
    next one.
    """

    def __init__(
        self, answer: OnCall, tell: Callable[[Answer], bool], orphans: Orphans | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._answer = answer
        self._tell = tell
        self.turn: CallTurn | None = None  # set at the first call on the control channel
        self._orphans = orphans or Orphans()
        self._settle = settle
        self._performed = 0  # running tools
        self._lock = threading.Lock()
        self._open: set[int] = set()
        # A sent answer makes room for another call. A guest that does not read its answers keeps its
        # calls open.
        self.sent: Callable[[int], None] = self._open.discard
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def begin(self, call: Call) -> None:
        """Start `call`, unless the program has ended; raises ProtocolError for an invalid call."""
        if self.ready >= 0:
            self.open(call)
            _WORKERS.do(partial(self._perform, call))

    def open(self, call: Call) -> None:
        """Count `call`, which this thread or another one executes; raises ProtocolError."""
        if call.number in self._open or len(self._open) >= _MOST_OPEN:
            self._refuse(call)
        self._open.add(call.number)
        with self._lock:
            self._performed += 1

    def _refuse(self, call: Call) -> None:
        """Raise ProtocolError, unless the guest has read an answer just now."""
        if self._settle:
            self._settle()
        if call.number in self._open:
            raise ProtocolError("a call of a tool with the number of another one")
        if len(self._open) >= _MOST_OPEN:
            raise ProtocolError(f"more than {_MOST_OPEN} calls of tools at once")

    def _perform(self, call: Call | None) -> None:
        while call:
            try:
                try:
                    self._answer(call, self._put)
                finally:
                    with self._lock:
                        self._performed -= 1
                        is_orphan = self.ready < 0
                    if is_orphan:
                        self._orphans.add(-1)
                call = self.turn.wait() if self.turn else None
            except BaseException:
                if self.turn:
                    self.turn.give_back()
                raise

    def close(self) -> None:
        """Forget the open calls: a tool that still runs is an orphan, and its answer is dropped.

        May be called twice.
        """
        with self._lock:
            if self.ready >= 0:
                os.close(self.ready)
                self.ready = -1
                self._orphans.add(self._performed)
        if self.turn:
            self.turn.close()

    def alarm(self) -> None:
        """Make `ready` readable, unless the program has ended."""
        with self._lock:
            if self.ready >= 0:
                os.eventfd_write(self.ready, 1)

    def _put(self, answer: Answer) -> None:
        with self._lock:
            if self.ready >= 0 and self._tell(answer):
                os.eventfd_write(self.ready, 1)


class _Workers:
    """A thread pool that grows with the open calls and shrinks when threads are idle.

    Each open call has a thread, so that a tool may call another tool without a deadlock.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the pool: the child of a fork has no thread but its own."""
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def do(self, work: Callable[[], None]) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = queue.SimpleQueue()
            begin_thread("cellwright-tool", partial(self._serve, worker))
        worker.put(work)

    def _serve(self, own: "queue.SimpleQueue[Callable[[], None]]") -> None:
        while True:
            try:
                own.get(timeout=_IDLE_SECONDS)()
            except queue.Empty:
                with self._lock:
                    if own in self._idle:
                        self._idle.remove(own)
                        return
                continue  # a call arrived at this moment
            with self._lock:
                self._idle.append(own)


_WORKERS = _Workers()
os.register_at_fork(after_in_child=_WORKERS.forget)
os.register_at_fork(after_in_child=Orphans.forget)


_AT_ONCE = 32  # the guest's own limit of concurrent calls on the control channel
# Limit of doors that were closed without a call. The process may keep its end open: 3 KiB that no
# cgroup of the cell counts.
_MOST_UNUSED = 1000
_MOST_WAITING = 256  # so many processes of a cell may wait in open(2); dead ones are removed
_NOW = int(_socket.MSG_DONTWAIT)
_SHORT = PACKET_BYTES // 4  # bytes of a value, characters of a message
_TEXTS = 3  # site, name and arguments; a NUL, which JSON cannot hold, ends each


class _Door:
    """An open door: `socket` until one side closes it, `asked` once the call is complete."""

    def __init__(self, number: int, sock: _socket.SocketType) -> None:
        self.number = number
        self.socket: _socket.SocketType | None = sock
        self.hears = True  # True until the guest closes its sending side
        self.heard = bytearray()
        self.texts = 0
        self.asked = False
        self.left = memoryview(b"")  # the unsent rest of the answer


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
        self._count = self._unused = 0
        self._open: dict[int, _Door] = {}  # open doors by the (negative) number of the call
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
        """Send a short answer from any thread, and queue its rest for the poll loop, which closes
        the door; return whether the poll loop has something to do."""
        left, door = None, self._open.get(answer.number)
        if door is None:  # all doors have been closed
            return False
        if len(answer.value or answer.message) <= _SHORT:
            text = _text_of(answer)
            # OSError: the poll loop sends the answer later, or drops it.
            with self._sending, contextlib.suppress(OSError):
                left = text[door.socket.send(text, _NOW) :] if door.socket else None
        self._kept.append((answer, left))
        return True

    def send_kept(self) -> None:
        """Send the rest of answers; drop an answer whose process has closed its door."""
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
            if self._unused >= _MOST_UNUSED:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
            name_for_good(theirs)
        except OSError:  # or this process has no descriptor left
            notifications.refuse(self._listener, notification, errno.EAGAIN)
            return
        self._count += 1
        door = self._open[-self._count] = _Door(-self._count, ours)
        self._watch(door)
        # If the process does not get the descriptor, it is closed, and the door is notified.
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
            self._take(door, data)
            return
        door.hears = False
        self._watch(door)  # the guest may have closed only its sending side and wait for the answer
        if not door.asked:
            self._unused += 1
            self._hang_up(door)
            self._forget(door)

    def _take(self, door: _Door, data: bytes) -> None:
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

"""The open tool calls of one program.  Each has a thread of its own, so that the poll loop that watches
the program never waits for a tool."""

import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..channel import ProtocolError
from ..messages import Answer, Call
from ..threads import begin

Tell = Callable[[Answer], None]
# Must not raise.  It passes the answer to Tell as the last thing that it does, or passes nothing if the
# program is being stopped; answers reach the program in the order in which they are passed.
OnCall = Callable[[Call, Tell], None]
_MOST_OPEN = 64
_IDLE_SECONDS = 3.0
_MOST_ORPHANS = 64  # for each caller: as many as one program may have open
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
    """The turn to read the control channel (control_turn.py)."""

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
        self.turn: CallTurn | None = None  # from the first call on the control channel on
        self._orphans = orphans or Orphans()
        self._settle = settle
        self._performed = 0  # calls whose tools have not ended
        self._lock = threading.Lock()
        self._open: set[int] = set()
        # Makes room for another call: this answer was sent.  A guest that does not read its answers
        # keeps its calls open.
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
            begin("cellwright-tool", partial(self._serve, worker))
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
                continue  # work arrived at this moment
            with self._lock:
                self._idle.append(own)


_WORKERS = _Workers()
os.register_at_fork(after_in_child=_WORKERS.forget)
os.register_at_fork(after_in_child=Orphans.forget)

"""The calls of tools that one program has open: each is answered by a thread, so that whoever watches
the program never waits for a tool."""

import os
import queue
import threading
from collections.abc import Callable, Iterable

from .channel import ProtocolError
from .messages import Answer, Call

OnCall = Callable[[Call], Answer | None]  # must not raise; None: the program is being stopped
_MOST_OPEN = 64
_IDLE_SECONDS = 3.0


class Calls:
    """Those of one execution.  `ready` is readable once there are answers to take."""

    def __init__(self, answer: OnCall) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._answers: list[Answer] = []
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def begin(self, call: Call) -> None:
        """Have `call` answered; raises ProtocolError for one that no honest guest makes."""
        if call.number in self._open:
            raise ProtocolError("a call of a tool with the number of another one")
        if len(self._open) >= _MOST_OPEN:
            raise ProtocolError(f"more than {_MOST_OPEN} calls of tools at once")
        self._open.add(call.number)
        _WORKERS.do(lambda: self._put(self._answer(call)))

    def take(self) -> list[Answer]:
        """Return the answers that have come since; a call is open until its answer was `sent`."""
        os.eventfd_read(self.ready)
        with self._lock:
            taken, self._answers = self._answers, []
        return taken

    def sent(self, numbers: Iterable[int]) -> None:
        """Make room: who calls and does not listen has only so many answers kept."""
        self._open.difference_update(numbers)

    def close(self) -> None:
        """Forget what is open: a tool that still runs will find nobody to tell."""
        with self._lock:
            os.close(self.ready)
            self.ready = -1

    def _put(self, answer: Answer | None) -> None:
        with self._lock:
            if answer and self.ready >= 0:
                self._answers.append(answer)
                os.eventfd_write(self.ready, 1)


class _Workers:
    """Threads that wait for something to do, for a while; each does one thing at a time.

    There are as many as calls are open: none waits for another, so tools may call tools.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin with none: the child of a fork has no thread but its own."""
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def do(self, work: Callable[[], None]) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(worker,), name="cellwright-tool", daemon=True
            ).start()
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
                continue  # it was just given something
            with self._lock:
                self._idle.append(own)


_WORKERS = _Workers()
os.register_at_fork(after_in_child=_WORKERS.forget)

"""Who may run now: so many at once, and the rest in the order in which they came."""

import threading
from collections import deque

from ..policies.errors import BusyError, ClosedError


class Turns:
    """Lets `running` callers in at once; a turn that ends is handed to who waits longest."""

    def __init__(self, running: int, queue_seconds: float) -> None:
        self._free = running
        self._running = running
        self._queue_seconds = queue_seconds
        self._lock = threading.Lock()
        self._queue: deque[threading.Event] = deque()
        self._closed = False

    def take(self) -> None:
        """Wait for a turn; raises BusyError if none came in time, ClosedError."""
        with self._lock:
            self._check_open()
            if self._free > 0:
                self._free -= 1
                return
            mine = threading.Event()
            self._queue.append(mine)
        if not mine.wait(self._queue_seconds) and self._left(mine):
            raise BusyError(
                f"{self._running} cells are running, and none ended in {self._queue_seconds:g} s",
                "try again later, or let more run at once",
            )
        self._check_open()

    def try_take(self) -> bool:
        """Take a turn if one is free and nobody waits; tell whether it was taken."""
        with self._lock:
            free = self._free > 0 and not self._closed
            self._free -= free
            return free

    def end(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().set()
            else:
                self._free += 1

    def close(self) -> None:
        """Turn away whoever waits."""
        with self._lock:
            self._closed = True
            for waiting in self._queue:
                waiting.set()

    def _left(self, mine: threading.Event) -> bool:
        """Leave the queue; False if the turn came in this very moment."""
        with self._lock:
            if mine.is_set():
                return False
            self._queue.remove(mine)
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the sandbox was closed")

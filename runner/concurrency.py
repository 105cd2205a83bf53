"""`ConcurrencyLimit`: a limit on calls that run at once; further calls queue in order of arrival."""

import os
import select
import threading
from collections import deque

from ..policies.errors import BusyError, ClosedError

NEVER = -1  # no descriptor: the wait cannot be cancelled


class ConcurrencyLimit:
    """Holds `running` slots; one that is released goes to the caller that waits longest."""

    def __init__(self, running: int, queue_seconds: float) -> None:
        self._free = running
        self._running = running
        self._queue_seconds = queue_seconds
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()  # an eventfd for each waiting caller
        self._closed = False

    def acquire(self, cancel: int = NEVER) -> bool:
        """Wait for a slot, or until the descriptor `cancel` is readable; return whether it was taken.

        Raises BusyError if no slot was free within `queue_seconds`, and ClosedError.
        """
        with self._lock:
            self._check_open()
            if self._free > 0:
                self._free -= 1
                return True
            mine = os.eventfd(0, os.EFD_CLOEXEC)
            self._queue.append(mine)
        try:
            return self._wait(mine, cancel)
        finally:
            os.close(mine)

    def try_acquire(self) -> bool:
        """Take a slot if one is free and the queue is empty; return whether it was taken."""
        with self._lock:
            free = self._free > 0 and not self._closed
            self._free -= free
            return free

    def release(self) -> None:
        with self._lock:
            if self._queue:
                os.eventfd_write(self._queue.popleft(), 1)
            else:
                self._free += 1

    def close(self) -> None:
        """Refuse all waiting callers, with ClosedError."""
        with self._lock:
            self._closed = True
            while self._queue:
                os.eventfd_write(self._queue.popleft(), 1)

    def _wait(self, mine: int, cancel: int) -> bool:
        poll = select.poll()
        poll.register(mine, select.POLLIN)
        if cancel >= 0:
            poll.register(cancel, select.POLLIN)
        try:
            ready = [descriptor for descriptor, _ in poll.poll(self._queue_seconds * 1000)]
        except BaseException:  # Ctrl-C: a slot given to our closed descriptor would be lost
            if not self._left(mine):
                self.release()
            raise
        if mine not in ready and self._left(mine):
            if ready:
                return False
            raise BusyError(
                f"{self._running} cells are running, and none ended in {self._queue_seconds:g} s",
                "try again later, or let more run at once",
            )
        self._check_open()
        return True

    def _left(self, mine: int) -> bool:
        """Leave the queue; return False if the slot came at this moment."""
        with self._lock:
            if mine not in self._queue:
                return False
            self._queue.remove(mine)
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the sandbox was closed")

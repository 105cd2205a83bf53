"""`ConcurrencyLimit`: a limit on calls that run at once; further calls queue in order of arrival."""

import os
import select
import threading
from collections import deque

from ..policies.errors import BusyError, ClosedError, QuotaExceeded

NEVER = -1  # no descriptor: the wait cannot be cancelled


class ConcurrencyLimit:
    """Holds `running` slots; one that is released goes to the caller that waits longest.

    At most `queue` callers wait; default any number.
    """

    def __init__(self, running: int, queue_seconds: float, queue: int | None = None) -> None:
        self._free = running  # below 0 after `resize`: so many have to end before another begins
        self._most_waiting = queue
        self._running = running
        self._queue_seconds = queue_seconds
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()  # an eventfd for each waiting caller
        self._closed = False

    def acquire(self, cancel: int = NEVER) -> bool:
        """Wait for a slot, or until the descriptor `cancel` is readable; return whether it was taken.

        Raises BusyError if no slot was free within `queue_seconds`, its subclass QuotaExceeded if too
        many callers wait, and ClosedError.
        """
        with self._lock:
            self._check_open()
            if self._free > 0:
                self._free -= 1
                return True
            if self._most_waiting is not None and len(self._queue) >= self._most_waiting:
                raise QuotaExceeded(
                    f"{self._running} run and {len(self._queue)} wait, which is the most"
                )
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
            self._free += 1
            if self._queue:
                self._hand_on()

    def resize(self, running: int, queue_seconds: float, queue: int | None) -> None:
        """Change the settings; callers that hold a slot or wait already keep it, or wait on."""
        with self._lock:
            self._free += running - self._running
            self._running, self._queue_seconds, self._most_waiting = running, queue_seconds, queue
            self._hand_on()

    def _hand_on(self) -> None:
        """Give free slots to those that wait; the caller holds the lock."""
        while self._queue and self._free > 0:
            self._free -= 1
            os.eventfd_write(self._queue.popleft(), 1)

    def load(self) -> tuple[int, int]:
        """Return how many slots are taken, and how many callers wait for one."""
        with self._lock:
            return self._running - self._free, len(self._queue)

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

"""`ConcurrencyLimit`: a limit on calls that run at once; further calls queue in order of arrival.

Threads of cellwright are daemons: they never keep the embedding process from exiting.
"""

import contextvars
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from ..policies.errors import BudgetExceeded, BusyError, ClosedError, LaunchError, QuotaExceeded
from .channel import has_news

NEVER = -1  # stands for no descriptor: the wait cannot be cancelled


class ConcurrencyLimit:
    """Holds `running` slots; one that is released goes to the caller that waits longest.

    At most `queue` callers wait; default any number.
    """

    def __init__(self, running: int, queue_seconds: float, queue: int | None = None) -> None:
        # negative after `resize`: so many calls must end before the next begins
        self._free = running
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
            if self._free > 0 and not self._closed:
                self._free -= 1
                return True
            self._check_open()
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
        """Give free slots to waiting callers; the caller of this holds the lock."""
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


def begin_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread that does `work`; raises LaunchError if the system has no thread left."""
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    except RuntimeError as error:  # pthread_create(3) reports every shortage as EAGAIN
        hint = "memory, RLIMIT_NPROC or the pids cgroup of this process is used up"
        raise LaunchError(f"cannot start a thread: {error}", hint) from None
    return thread


# Whatever parses, checks, matches or renders hostile input on the host takes a Budget and spends
# steps as it works: before a piece of work, in proportion to what that piece can cost at most.
# A descriptor that becomes readable when the caller of the running tool has given up.
CANCEL: contextvars.ContextVar[int] = contextvars.ContextVar("cancel", default=NEVER)

STEPS_PER_SECOND = 2_000_000  # a step stands for half a microsecond of Python
_LOOK_EVERY = 10_000  # steps between two looks at the clock and the descriptor: about 5 ms


class Budget:
    """Steps, a deadline and a descriptor that cancels.  For one thread at a time.

    `what` names the work in the error.  `seconds` count from now; `cancel` is a descriptor that is
    readable once the caller has given up.  A budget that is part of another spends of both.
    """

    def __init__(
        self, what: str, steps: float, *, seconds: float = float("inf"), cancel: int = NEVER,
        whole: "Budget | None" = None,
    ) -> None:  # fmt: skip
        self.what = what
        self.spent = 0
        self._steps = steps
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._cancel = cancel
        self._whole = whole
        self._look_at = 0  # in steps; the first step looks

    def wait_for(self, descriptor: int) -> None:
        """Wait until there is something to read, or the end; raises BudgetExceeded."""
        deadline, cancels = self._ends()
        poll = select.poll()
        for each in (descriptor, *cancels):
            poll.register(each, select.POLLIN)
        while not has_news(descriptor):
            self.look()
            left = deadline - time.monotonic()
            poll.poll(None if left == float("inf") else max(left * 1000, 0))

    def _ends(self) -> tuple[float, list[int]]:
        deadline, cancels = self._whole._ends() if self._whole else (float("inf"), [])
        return min(deadline, self._deadline), cancels + [self._cancel] * (self._cancel >= 0)

    def part(self, what: str, steps: float) -> "Budget":
        """Return a budget of so many steps for a part of the work, which ends with this one."""
        return Budget(what, steps, whole=self)

    def spend(self, steps: int = 1) -> None:
        """Count work that is about to be done; raises BudgetExceeded if it may not be."""
        if self._whole is not None:
            self._whole.spend(steps)
        self.spent += steps
        if self.spent > self._steps:
            raise BudgetExceeded(f"{self.what} takes more than {self._steps:.0f} steps")
        if self.spent >= self._look_at:
            self._look_at = self.spent + _LOOK_EVERY
            self.look()

    def look(self) -> None:
        """Look at the clock and the descriptor; raises BudgetExceeded."""
        if self._whole is not None:
            self._whole.look()
        if self._cancel >= 0 and has_news(self._cancel):
            raise BudgetExceeded(f"{self.what} was cancelled by the caller", cause="cancelled")
        if time.monotonic() > self._deadline:
            message = f"{self.what} takes longer than {self._seconds:g} s"
            raise BudgetExceeded(message, cause="wall_time")

"""Cells prepared ahead of need, each used once.

One thread makes and parks cells, another takes down used ones, so that a call does neither. Both wait
until no call has come for a moment, unless the pool is half empty or the backlog half full, so that
calls in quick succession have the processors to themselves. Where no cell is parked the caller makes
one.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from ...policies.errors import CellwrightError
from ..concurrency import begin_thread
from ..messages import MOST_AT_ONCE
from ..settings import PoolSettings
from .held_cell import HeldCell

_QUIET_SECONDS = 0.003  # calls further apart are not in quick succession


class Pool:
    """Lends parked cells, each once.  `make` yields as many as it is asked for, or fewer."""

    def __init__(self, settings: PoolSettings, make: Callable[[int], Iterable[HeldCell]]) -> None:
        self._settings = settings
        self._make = make
        self._lock = threading.RLock()
        self._to_fill, self._to_clear, self._changed = (
            threading.Condition(self._lock) for _ in range(3)
        )  # conditions for the two threads, and for callers of `settle`
        self._asleep: set[threading.Condition] = set()  # a thread waits on each for a call
        self._parked: deque[HeldCell] = deque()
        self._served: deque[HeldCell] = deque()
        self._at_work = 0  # threads that are making cells or taking them down
        self._failed = False  # the last cell could not be made: wait for the next call
        self._asked_at = 0.0
        self._cell_bytes = 0  # memory of the last parked cell
        self._closed = False
        self._threads: list[threading.Thread] = []
        if settings.size:
            try:
                for name, work in (("fill", self._fill), ("clear", self._clear)):
                    self._threads.append(begin_thread(f"cellwright-{name}", partial(_go_on, work)))
            except BaseException:
                self.close()
                raise

    def lease(self) -> HeldCell | None:
        """Return a parked cell, None if there is none."""
        with self._lock:
            self._asked_at = time.monotonic()
            self._failed = False
            leased = self._pop_living()
            # Normally the threads are woken when the call ends, so that it goes first. A call may take
            # long, so the thread that fills is woken now if half of the pool is empty.
            if 1 < self._settings.size > 2 * len(self._parked):
                self._to_fill.notify()
            return leased

    def level(self) -> tuple[int, int]:
        """Return how many cells are parked, and how many are wanted now."""
        with self._lock:
            return len(self._parked), self._target()

    def give_back(self, held: HeldCell) -> None:
        """Take down a used cell, after the call has returned if the backlog allows."""
        with self._lock:
            backlog = len(self._served) + 1
            later = not self._closed and backlog <= self._settings.size
            if later:
                self._served.append(held)
            # A thread that sleeps until calls pause wakes by itself, and then wakes the filling thread.
            if self._to_clear in self._asleep or 2 * backlog > self._settings.size:
                self._to_clear.notify()
        if not later:  # a caller that uses cells faster than they are taken down takes down its own
            held.dispose()

    def refresh(self) -> None:
        """Take down parked cells that are outdated, and park others in their place."""
        with self._lock:
            parked, self._parked = self._parked, deque()
            for held in parked:
                (self._parked if held.is_current() else self._served).append(held)
            self._failed = False
            self._wake_all()

    def settle(self) -> None:
        """Wait until every used cell is gone and the pool is as full as it gets."""
        with self._lock:
            self._asked_at = time.monotonic() - _QUIET_SECONDS
            if not self._is_settled():  # the next call must not compete with two idle threads
                self._wake_all()
                self._changed.wait_for(self._is_settled)

    def close(self) -> None:
        """Stop, and take down every parked or served cell."""
        with self._lock:
            self._closed = True
            self._wake_all()
        for thread in self._threads:
            thread.join()
        for held in (*self._parked, *self._served):
            with contextlib.suppress(CellwrightError):
                held.dispose()
        self._parked.clear()
        self._served.clear()

    def _pop_living(self) -> HeldCell | None:
        while self._parked:
            held = self._parked.popleft()
            if held.is_current():
                return held
            self._served.append(held)  # its launcher died, or shows outdated paths
        return None

    def _target(self) -> int:
        settings = self._settings
        idle = time.monotonic() - self._asked_at > settings.idle_seconds
        wanted = settings.low_water if idle else settings.size
        return min(wanted, settings.memory_bytes // max(1, self._cell_bytes))

    def _is_settled(self) -> bool:
        full = self._failed or len(self._parked) >= self._target()
        return self._closed or (full and not self._served and not self._at_work)

    # the two threads

    def _fill(self) -> bool:
        """Make cells once some are wanted; return False once the pool is closed."""
        if not (wanted := self._wait_until(self._to_fill, self._wanted)):
            return False
        failed = True
        try:
            for made in self._make(wanted):
                try:
                    self._cell_bytes = made.memory_bytes()
                finally:
                    with self._lock:
                        self._parked.append(made)
            failed = False
        finally:  # the next caller will see the same error
            with self._lock:
                self._failed = failed
                self._done()
        return True

    def _wanted(self) -> int:
        parked = len(self._parked)
        missing = self._target() - parked
        while missing < 0:  # the pool is idle, so the oldest cells are taken down first
            self._served.append(self._parked.popleft())
            missing += 1
            self._to_clear.notify()
        if self._failed or not (2 * parked < self._settings.size or self._is_quiet()):
            return 0
        most = (
            MOST_AT_ONCE if parked or self._cell_bytes else 1
        )  # until the memory of a cell is known
        return min(missing, most)

    def _wants_clearing(self) -> int:
        backlog = len(self._served)
        if self._is_quiet():
            self._to_fill.notify()
            return backlog
        return backlog if 2 * backlog > self._settings.size else 0

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._asked_at >= _QUIET_SECONDS

    def _clear(self) -> bool:
        """Take down used cells once there are some; return False once the pool is closed."""
        backlog = self._wait_until(self._to_clear, self._wants_clearing)
        try:
            for _ in range(backlog):
                with self._lock:
                    held = self._served.popleft()
                held.dispose()
        finally:
            if backlog:
                with self._lock:
                    self._done()
        return backlog > 0

    def _wait_until(self, mine: threading.Condition, wanted: Callable[[], int]) -> int:
        """Wait for work and return how much there is; 0 once the pool is closed."""
        with self._lock:
            while not self._closed:
                if much := wanted():
                    self._at_work += 1
                    return much
                until_quiet = self._asked_at + _QUIET_SECONDS - time.monotonic()
                if until_quiet > 0:
                    mine.wait(until_quiet)
                    continue
                self._asleep.add(mine)
                mine.wait(self._settings.idle_seconds)
                self._asleep.discard(mine)
            return 0

    def _done(self) -> None:
        self._at_work -= 1
        self._changed.notify_all()

    def _wake_all(self) -> None:
        for each in (self._to_fill, self._to_clear, self._changed):
            each.notify_all()


def _go_on(work: Callable[[], bool]) -> None:
    """Repeat `work` until it returns False.  An error may last as long as memory is short; if the
    thread ended because of it, `settle` would wait for it forever and no cell would be parked or
    taken down."""
    while True:
        try:
            if not work():
                return
        except Exception:  # noqa: BLE001 - the next caller will see the same error
            time.sleep(_QUIET_SECONDS)

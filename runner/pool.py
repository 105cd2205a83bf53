"""Cells prepared ahead of need, each used once.

One thread makes cells and parks them, another takes down those that have served, so that a call has
to do neither.  Both wait until nobody has called for a moment, unless the pool is half empty or the
backlog half full: calls in quick succession have the processors to themselves.  Where no cell is
parked the caller makes one.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..policies.errors import CellwrightError
from .custody import Custody
from .threads import begin

_QUIET_SECONDS = 0.003  # after it, calls do not come in quick succession


class PoolSettings(NamedTuple):
    """How many cells wait, how many may run, and how long a call waits for its turn."""

    size: int = 8  # parked cells; 0: a call makes its own and takes it down before it returns
    low_water: int = 1  # parked cells that stay after `idle_seconds` without a call
    idle_seconds: float = 60.0
    memory_bytes: int = 256 * 1024 * 1024  # that parked cells hold together, as their cgroups count
    running: int = 64  # cells in use at once, without those of sessions and long-lived programs
    programs: int = 32  # long-lived programs at once
    queue_seconds: float = 30.0  # how long a call waits for its turn
    # The cells of one launcher share address layout and hash seed: after so many a new one starts.
    cells_per_launcher: int = 10_000


class Pool:
    """Lends parked cells, each once.  `make` forks and prepares one."""

    def __init__(self, settings: PoolSettings, make: Callable[[], Custody]) -> None:
        self._settings = settings
        self._make = make
        self._changed = threading.Condition()
        self._parked: deque[Custody] = deque()
        self._served: deque[Custody] = deque()
        self._at_work = 0  # cells that a thread is making or taking down
        self._failed = False  # the last cell could not be made: wait for the next call
        self._asked_at = 0.0
        self._cell_bytes = 0  # the last cell's memory once it was parked
        self._closed = False
        self._threads: list[threading.Thread] = []
        if settings.size:
            try:
                for name, work in (("fill", self._fill), ("clear", self._clear)):
                    self._threads.append(begin(f"cellwright-{name}", partial(_go_on, work)))
            except BaseException:
                self.close()
                raise

    def lease(self) -> Custody | None:
        """Return a parked cell, None if there is none."""
        with self._changed:
            self._asked_at = time.monotonic()
            self._failed = False
            leased = self._pop_living()
            # The threads are woken when the call ends, so that it goes first; but it may take long.
            if 1 < self._settings.size > 2 * len(self._parked):
                self._changed.notify_all()
            return leased

    def give_back(self, custody: Custody) -> None:
        """Take down a used cell, after the call has returned if the backlog allows."""
        with self._changed:
            later = not self._closed and len(self._served) < self._settings.size
            if later:
                self._served.append(custody)
            self._changed.notify_all()
        if not later:  # a caller that uses cells faster than they are taken down helps
            custody.dispose()

    def settle(self) -> None:
        """Wait until every used cell is gone and the pool is as full as it gets."""
        with self._changed:
            self._asked_at = time.monotonic() - _QUIET_SECONDS
            self._changed.notify_all()
            self._changed.wait_for(self._is_settled)

    def close(self) -> None:
        """Stop, and take down every parked or served cell."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for custody in (*self._parked, *self._served):
            with contextlib.suppress(CellwrightError):
                custody.dispose()
        self._parked.clear()
        self._served.clear()

    def _pop_living(self) -> Custody | None:
        while self._parked:
            custody = self._parked.popleft()
            if custody.is_current():
                return custody
            self._served.append(custody)  # its launcher died, or shows outdated paths
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
        """Make a cell once one is wanted; return False once the pool is closed."""
        if not self._wait_until(self._wants_cell):
            return False
        made: Custody | None = None
        try:
            made = self._make()
            self._cell_bytes = made.memory_bytes()
        finally:  # the next caller will see the same error
            with self._changed:
                self._failed = made is None
                if made is not None:
                    self._parked.append(made)
            self._done()
        return True

    def _wants_cell(self) -> bool:
        surplus = len(self._parked) - self._target()
        while surplus > 0:  # idle: the oldest go first
            self._served.append(self._parked.popleft())
            surplus -= 1
            self._changed.notify_all()
        if surplus >= 0 or self._failed:
            return False
        return len(self._parked) < self._settings.size / 2 or self._is_quiet()

    def _wants_clearing(self) -> bool:
        backlog = len(self._served)
        return backlog > self._settings.size / 2 or (backlog > 0 and self._is_quiet())

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._asked_at >= _QUIET_SECONDS

    def _clear(self) -> bool:
        """Take down a used cell once there is one; return False once the pool is closed."""
        if not self._wait_until(self._wants_clearing):
            return False
        try:
            with self._changed:
                custody = self._served.popleft()
            custody.dispose()
        finally:
            self._done()
        return True

    def _wait_until(self, wanted: Callable[[], bool]) -> bool:
        """Wait for work; return False once the pool is closed."""
        with self._changed:
            while not self._closed and not wanted():
                idle = self._is_quiet()
                self._changed.wait(self._settings.idle_seconds if idle else _QUIET_SECONDS)
            self._at_work += 1
            return not self._closed

    def _done(self) -> None:
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()


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

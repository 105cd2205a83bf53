"""`Workers`: the workers of one sandbox, placed by load and replaced when they die."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from ....policies.errors import CellwrightError, ClosedError, LaunchError
from ....runner.concurrency import begin_thread
from .worker_process import Worker

_PATIENCE_SECONDS = 120.0  # for another worker while none lives
_MANY = 1 << 60
Load = Callable[[Worker], int]
_PAUSE_SECONDS = 5.0  # from a failure to start one to the next try


class Workers:
    """Safe from many threads.

    `make` starts the worker of a number, which calls its last argument when it has ended.
    """

    def __init__(
        self, count: int, make: Callable[[int, Callable[[Worker], None]], Worker],
        on_death: Callable[[Worker], None],
    ) -> None:  # fmt: skip
        """Start all, at the same time; raises what the first of them raises that cannot start."""
        self._make = make
        self._on_death = on_death
        self._owner = os.getpid()
        self._lock = threading.Lock()  # taking it by the condition would be two calls of Python
        self._changed = threading.Condition(self._lock)
        self._closed = self._is_open = False
        self._used = 0
        self._failure: CellwrightError | None = None
        self._again_at = 0.0  # when to try again after a failure
        self._workers: list[Worker] = []
        self._starting: list[Worker] = []  # workers that take the place of others
        self._replaced: list[Worker] = []  # workers whose places they take
        self._begun = 0
        try:
            for _ in range(count):
                self._workers.append(self._new())
            for worker in self._workers:
                worker.wait()
            self._is_open = True
        except BaseException:
            self.close()
            raise

    def all(self) -> list[Worker]:
        """Return those that take requests."""
        with self._changed:
            return [each for each in self._workers if each.is_ready]

    @contextlib.contextmanager
    def lent(self, load: Load | None = None, bound: Worker | None = None) -> Iterator[Worker]:
        """Lend the worker with the fewest calls, among equals the one that rested longest.

        `load` counts before the calls; `bound` is lent if it lives.  Raises ClosedError, and
        LaunchError if none lives and none can be started.
        """
        worker = self.take(load, bound)
        try:
            yield worker
        finally:
            self.give_back(worker)

    def give_back(self, worker: Worker) -> None:
        """Return a worker of `take`."""
        with self._lock:
            worker.running -= 1

    def take(self, load: Load | None = None, bound: Worker | None = None) -> Worker:
        """Do what `lent` does, until `give_back`: each call pays for it."""
        if os.getpid() != self._owner:
            raise ClosedError("the sandbox was made before this process forked: make a new one")
        with self._lock:
            is_bound = bound and bound.is_ready
            best = (bound if is_bound else self._best(load)) or self._awaited()
            best.running += 1
            self._used += 1
            best.used = self._used
            return best

    def _best(self, load: Load | None = None) -> Worker | None:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        best, least = None, (_MANY, 0, 0)
        for each in self._workers:
            if not each.is_ready:
                self._replace_soon(each)
                continue
            its_load = (load(each) if load else 0, each.running, each.used)
            if its_load < least:
                best, least = each, its_load
        return best

    def _awaited(self) -> Worker:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (best := self._best()):
            if self._failure:
                raise self._failure
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                raise LaunchError("every worker has ended, and none has started yet")
        return best

    def _note_end(self, worker: Worker) -> None:
        with self._changed:
            has_died = worker in self._workers and self._is_open and not self._closed
            if has_died:
                self._replace_soon(worker)
        if has_died:
            self._on_death(worker)

    def _replace_soon(self, worker: Worker) -> None:
        """Start another worker in the place of one that has ended, unless that was just tried; the
        caller holds the lock."""
        if worker not in self._replaced and time.monotonic() >= self._again_at:
            self._replaced.append(worker)
            self._failure = None
            begin_thread("cellwright-workers", lambda: self._replace(worker))

    def _replace(self, worker: Worker) -> None:
        made, failure = None, None
        try:
            with self._changed:
                if not self._closed:
                    made = self._new()
                    self._starting.append(made)
            if made:
                made.wait()
        except CellwrightError as error:
            failure = error
        with self._changed:
            self._replaced.remove(worker)
            if failure:
                self._failure, self._again_at = failure, time.monotonic() + _PAUSE_SECONDS
            elif made and not self._closed:
                self._workers[self._workers.index(worker)] = made
            if made and made in self._starting:
                self._starting.remove(made)
            self._changed.notify_all()
        if made and failure:
            made.hang_up()
            made.reap()

    def _new(self) -> Worker:
        self._begun += 1
        return self._make(self._begun, self._note_end)

    def close(self) -> None:
        """End them all; closing twice is fine, and does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._closed = True
            workers = [*self._workers, *self._starting]
            self._changed.notify_all()
        for each in workers:
            each.hang_up()
        for each in workers:
            each.reap()

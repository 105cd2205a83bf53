"""Workers that are killed at random: only their calls are lost, each ends once, nothing is left."""

import gc
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.workers.worker_cells import WorkerCells
from ..harness.sandbox.workers.worker_process import Worker
from ..harness.sandbox.workers.workers import Workers
from ..policies.errors import CellwrightError, LauncherLost, SessionLost
from .census import cgroups_of
from .conversations import Make, repeat, with_calls, with_sessions
from .leak_checks import LeakCheck, settled, whole
from .report import Criterion, Value
from .settings import Settings, sandbox

_SEED = 20261127
_NAME = "workers killed at random"
_WORKERS, _CALLING, _STAYING = 3, 4, 2
_SECONDS, _SMOKE_SECONDS = 60.0, 4.0
_WARM_UP_PART = 4
_START_SECONDS = 120.0
_BETWEEN_SECONDS = 1.5  # two kills, in the mean


class PlacedCalls:
    """Calls of every form on a sandbox with workers, and which worker had each."""

    def __init__(self, made: Sandbox) -> None:
        assert isinstance(made._cells, WorkerCells)
        self._made = made
        self.workers: Workers = made._cells._workers
        self._chance = random.Random(_SEED)
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self.killed: set[int] = set()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._take = self.workers.take
        vars(self.workers)["take"] = self._noted_take

    def _noted_take(self, load: Any = None, bound: Worker | None = None) -> Worker:
        worker = self._take(load, bound)
        self._of_thread.pid = (
            bound or worker
        ).pid  # the session of a killed worker is lost with it
        return worker

    def make(self, seconds: float, *, kill: bool) -> None:
        """Make calls for so long, while workers are killed, one at least, or none."""
        over, end = threading.Event(), time.monotonic() + seconds
        talks = [with_calls] * _CALLING + [with_sessions] * _STAYING
        with ThreadPoolExecutor(len(talks)) as threads:
            try:
                work = [threads.submit(each, self._made, over, self._note) for each in talks]
                self._kill_until(end) if kill else time.sleep(seconds)
            finally:
                over.set()
        for each in work:
            each.result()

    def _kill_until(self, end: float) -> None:
        while time.monotonic() < end or not self.killed:
            time.sleep(self._chance.expovariate(1 / _BETWEEN_SECONDS))
            if living := self.workers.all():
                worker = self._chance.choice(living)
                self.killed.add(worker.pid)
                signal.pidfd_send_signal(worker._pidfd, signal.SIGKILL)

    def await_replacement(self, count: int) -> None:
        """Wait until so many workers live, for as long as one may take to start."""
        with self.workers._changed:
            self.workers._changed.wait_for(
                lambda: sum(each.is_ready for each in self.workers._workers) >= count,
                _START_SECONDS,
            )

    def _note(self, make: Make) -> None:
        """Make a call, and note its end; only a call whose worker was killed may end without its
        answer."""
        try:
            answer = make()
            end, is_right = "answered", answer.heard == answer.nonce
            said = f"wanted {answer.nonce}, heard {answer.heard[:40]!r}"
            may_be_lost = not answer.heard and bool(answer.result and not answer.result.ok)
        except CellwrightError as error:
            end, is_right, said = type(error).__name__, False, f"{type(error).__name__}: {error}"
            may_be_lost = isinstance(error, LauncherLost | SessionLost)
        is_lost = may_be_lost and self._of_thread.pid in self.killed
        with self._lock:
            self.ends[end if is_right or end != "answered" else "lost"] += 1
            if not (is_right or is_lost):
                self.wrong.append(said)


def leak_checks(settings: Settings, rows: list[tuple[Value, ...]]) -> Iterator[LeakCheck]:
    """Yield the check; add to `rows` how the calls ended."""
    seconds = _SMOKE_SECONDS if settings.smoke else 60 * (settings.minutes or _SECONDS / 60)
    trail = Path(tempfile.mkdtemp(prefix="cellwright-"), "trail.jsonl")  # and its earlier files
    _calls_on(settings, trail, seconds / _WARM_UP_PART, kill=False)
    # Without the sandbox: how many connections it has depends on chance.  The collector closes pidfds.
    before = settled(gc.collect)
    ends, wrong, killed, living = _calls_on(settings, trail, seconds, kill=True)
    after = settled(gc.collect, before)
    rows += [(_NAME, f"calls that ended with {end}", n) for end, n in ends.most_common()]
    rows.append((_NAME, "workers killed", len(killed)))
    left = cgroups_of(killed | living)
    further = (
        Criterion(
            f"{_NAME}: each is replaced, and none leaves a cgroup",
            len(living) == _WORKERS and not killed & living and not left,
            f"{len(killed)} killed, {len(living)} live at the end, {left} cgroups are left",
        ),
        whole(_NAME, trail),
    )
    yield LeakCheck(_NAME, ends.total(), wrong, before, after, further)


def _calls_on(
    settings: Settings, trail: Path, seconds: float, *, kill: bool
) -> tuple[Counter[str], list[str], set[int], set[int]]:
    """Make calls on a sandbox; return how they ended, what was wrong, and the pids of the workers that
    were killed, and of those at the end."""
    with sandbox(settings, audit=trail, tools=(repeat,), workers=_WORKERS) as made:
        calls = PlacedCalls(made)
        calls.make(seconds, kill=kill)
        calls.await_replacement(_WORKERS)
        living = {each.pid for each in calls.workers.all()}
        return calls.ends, calls.wrong, calls.killed, living

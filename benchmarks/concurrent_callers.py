"""Two hundred callers at once: orderly and disorderly ones, alone and beside hostile neighbours."""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import CellwrightError
from ..policies.policy import Processes
from ..runner.settings import PoolSettings
from .callers import WELL, Probe, Prober, complaint_about, drawn, of_each, said
from .census import use_one_heap
from .daemon import daemon
from .leak_checks import LeakCheck, settled
from .measuring import median, percentile
from .programs import MORE_NEIGHBOURS, NEIGHBOURS
from .report import Column, Criterion, ReportTable, Value
from .settings import Settings, sandbox

_SEED = 20260101
_CALLERS, _SMOKE_CALLERS = 200, 20
_CALLS, _SMOKE_CALLS = 10_000, 200
_ONE_OF = 10  # callers is hostile
_TIMES_FIRST = 5  # a heap grows to what so many need together, and the more the more do harm
_STARVED = 3.0  # times the mean wait
_SLOWER = 2.0  # times the p99 without hostile neighbours
# A launcher that is replaced meanwhile may live on with cells that wait: that is another check.
_POOL = PoolSettings(queue_seconds=600, cells_per_launcher=10**6)
_HOSTILE = tuple({**NEIGHBOURS, **MORE_NEIGHBOURS}.values())
_HOSTILE_SECONDS = 2.0
_WALL_SECONDS = 120.0  # it takes a shell a while to fill its memory beside 64 others
_ALONE, _BESIDE = "many at once", "many at once, one in ten hostile"


class ConcurrentCallers:
    """Callers, each with a thread; remembers what it saw of those of Python that ended well: they stand
    in one queue and do the same."""

    def __init__(self, made: Sandbox, shared: Sandbox, caller: Prober, size: int) -> None:
        self._made = made
        self._shared = shared
        self._caller = caller
        self._size = size
        self.waits: list[float] = []
        self.times: list[float] = []

    def settle(self) -> None:
        self._made.settle()
        self._shared.settle()

    def make(self, calls: list[Probe], hostile: int) -> list[str]:
        """Make `calls`, shared among the threads but for `hostile` ones; return what was wrong."""
        self.waits.clear()
        self.times.clear()
        ordinary = self._size - hostile
        over = threading.Event()
        with ThreadPoolExecutor(self._size) as threads:
            hostile_calls = [
                threads.submit(self._run_hostile, number, over) for number in range(hostile)
            ]
            shares = [calls[number::ordinary] for number in range(ordinary)]
            try:
                told = list(threads.map(self._make_all, shares))
            finally:
                over.set()
            told += [each.result() for each in hostile_calls]
        return [complaint for share in told for complaint in share if complaint]

    def _make_all(self, calls: list[Probe]) -> list[str]:
        return [self._make(call) for call in calls]

    def _make(self, call: Probe) -> str:
        try:
            answer = self._caller.make(call)
        except CellwrightError as error:  # nothing was done that would justify one
            return f"{call.kind.name}, {call.language}: {type(error).__name__}: {error}"
        if answer.result and call == Probe(WELL):
            self.waits.append(answer.result.phases.lease)
            self.times.append(answer.result.execution_time)
        return complaint_about(call, answer)

    def _run_hostile(self, number: int, over: threading.Event) -> list[str]:
        """Run hostile programs, in turn, until all is over; say which could have had its way."""
        wrong = []
        while not over.is_set():
            nonce = os.urandom(8).hex()
            program = _HOSTILE[number % len(_HOSTILE)]
            code = f"print({nonce!r}, flush=True)\n{program}"
            result = self._made.execute(code, timeout=_HOSTILE_SECONDS)
            if result.stdout[: len(nonce)] not in (nonce, "") or result.ok:
                wrong.append(f"hostile: {said(result)}")
            number += 1
        return wrong


def leak_checks(settings: Settings, rows: list[tuple[Value, ...]]) -> Iterator[LeakCheck]:
    """Yield one check of callers among themselves, and one with hostile ones among them; add to `rows`
    how long calls waited and took."""
    use_one_heap()
    with _callers(settings) as (callers, size):
        count = max(size, settings.amount(_CALLS, _SMOKE_CALLS))
        calls = drawn(count, random.Random(_SEED))
        tails = []
        for name, hostile in ((_ALONE, 0), (_BESIDE, size // _ONE_OF)):
            callers.make(of_each() + calls[: size * _TIMES_FIRST], hostile)
            before = settled(callers.settle)
            wrong = callers.make(calls, hostile)
            rows.append(_row(name, callers))
            tails.append(percentile(callers.times, 0.99))
            further = () if settings.smoke else (_fair(name, callers), *_tail_ratio(tails))
            yield LeakCheck(
                name, len(calls), wrong, before, settled(callers.settle, before), further
            )


@contextlib.contextmanager
def _callers(settings: Settings) -> Iterator[tuple[ConcurrentCallers, int]]:
    size = _SMOKE_CALLERS if settings.smoke else _CALLERS
    patient = replace(settings.policy.limits, wall_seconds=_WALL_SECONDS)
    forking = replace(settings.policy, processes=Processes(subprocesses=True), limits=patient)
    with (
        daemon(settings) as path,
        sandbox(settings._replace(policy=forking), _POOL) as made,
        Sandbox(connect=path) as shared,
    ):
        yield ConcurrentCallers(made, shared, Prober(made, path), size), size


def _fair(name: str, callers: ConcurrentCallers) -> Criterion:
    longest, mean = max(callers.waits), sum(callers.waits) / len(callers.waits)
    return Criterion(
        f"{name}: no caller waits {_STARVED:g} times as long for a cell as the mean",
        longest < _STARVED * mean,
        f"longest {longest:.2f} s, mean {mean:.2f} s",
    )


def _tail_ratio(tails: list[float]) -> tuple[Criterion, ...]:
    if len(tails) < 2:
        return ()
    ratio = tails[1] / tails[0]
    what = f"{_BESIDE}: p99 of the others is less than {_SLOWER:g} times that without"
    return (Criterion(what, ratio < _SLOWER, f"{ratio:.2f} times"),)


def _row(name: str, callers: ConcurrentCallers) -> tuple[Value, ...]:
    mean = sum(callers.waits) / len(callers.waits)
    took = (median(callers.times), *(percentile(callers.times, share) for share in (0.9, 0.99)))
    return (name, len(callers.times), mean, max(callers.waits), *took)


def table(rows: list[tuple[Value, ...]]) -> ReportTable:
    """Return how long calls waited and took."""
    head = ("mean wait s", "longest wait s", "p50 s", "p90 s", "p99 s")
    return ReportTable(
        title="Calls of Python that ended well, of many callers at once",
        columns=(Column("callers"), Column("calls", 0), *(Column(name) for name in head)),
        rows=tuple(rows),
        note=f"{_CALLERS} callers; 64 cells may run at once, and so one waits for three that do.",
    )

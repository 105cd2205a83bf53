"""Fairness: callers are served in order, and a busy neighbour delays others by a bounded amount."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import Processes
from ..runner.settings import PoolSettings
from .measuring import Contender, median, percentile, side_by_side
from .programs import NEIGHBOURS, SUM
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_CALLERS = 16
_TARGET = 2.0
_QUIET = "nobody else"


def measure(settings: Settings) -> Report:
    """Return the order of a queue, and the latency of calls beside unkind neighbours."""
    order = _order_of_queue(settings)
    times = _beside_neighbours(settings)
    return Report(
        name="fairness",
        title="Neighbours and queues",
        tables=(_table(times),),
        verdicts=(_in_order(order), *_felt(times, smoke=settings.smoke)),
        notes=(
            "The neighbour is a guest of another sandbox of the same process, within its own caps.",
            f"{os.cpu_count()} processors.",
        ),
        samples={name: tuple(values) for name, values in times.items()},
    )


# The queue


def _order_of_queue(settings: Settings) -> list[int]:
    """Return who ran when, of callers that came one after the other while one cell may run."""
    ran: dict[int, float] = {}
    with sandbox(settings, PoolSettings(running=1, queue_seconds=600)) as made:

        def call(number: int) -> None:
            ran[number] = float(made.execute("import time; time.monotonic()").value)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(_CALLERS)]
        first = made.start("import time; print('up', flush=True); time.sleep(1.5)")
        next(first.output())
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # so that they come one after the other
        for thread in threads:
            thread.join()
        first.result()
    return sorted(ran, key=lambda number: ran[number])


def _in_order(order: list[int]) -> Criterion:
    return Criterion(
        f"{_CALLERS} callers are served in the order in which they came",
        order == sorted(order),
        ", ".join(map(str, order)),
    )


# Neighbours


def _beside_neighbours(settings: Settings) -> dict[str, list[float]]:
    """Measure in turns: a while alone, a while beside each neighbour, and over again."""
    rounds, runs = (1, 40) if settings.smoke else (5, 200)
    times: dict[str, list[float]] = {_QUIET: [], **{name: [] for name in NEIGHBOURS}}
    with sandbox(settings) as made, _neighbours_sandbox(settings) as theirs:
        call = Contender("", partial(made.execute, SUM.source), made.settle)
        for _ in range(settings.runs or rounds):
            for name in times:
                with _neighbour(theirs, NEIGHBOURS.get(name)):
                    times[name] += side_by_side([call], runs)[""]
    return times


@contextlib.contextmanager
def _neighbours_sandbox(settings: Settings) -> Iterator[Sandbox]:
    """Give a sandbox whose guests may fork, and whose output is not what ends them."""
    limits = replace(settings.policy.limits, output_total_bytes=2**50, wall_seconds=600.0)
    limits = replace(limits, cpu_seconds=600.0, processes=64)
    policy = replace(settings.policy, processes=Processes(subprocesses=True), limits=limits)
    with sandbox(settings._replace(policy=policy), pool=0) as made:
        yield made


@contextlib.contextmanager
def _neighbour(theirs: Sandbox, code: str | None) -> Iterator[None]:
    if code is None:
        yield
        return
    run = theirs.start(f"print('up', flush=True)\n{code}")
    try:
        next(run.output())
        yield
    finally:
        run.cancel()
        run.result()


def _share(times: list[float]) -> float:
    """Return which percentile so many values can bear."""
    return 0.99 if len(times) >= 200 else 0.9


def _table(times: dict[str, list[float]]) -> ReportTable:
    quiet = times[_QUIET]
    rows: list[tuple[Value, ...]] = []
    for name, values in times.items():
        ratios = [percentile(values, s) / percentile(quiet, s) for s in (0.5, _share(values))]
        rows.append((name, *(percentile(values, s) * 1e3 for s in (0.5, 0.9, 0.99)), *ratios))
    head = ("p50 ms", "p90 ms", "p99 ms", "p50 ratio", "tail ratio")
    return ReportTable(
        title="`1+1` with a cell that stood ready, beside a neighbour that ...",
        columns=(Column("neighbour"), *(Column(name) for name in head)),
        rows=tuple(rows),
        note="Tail: p99, or p90 where fewer than 200 runs were made.",
    )


def _felt(times: dict[str, list[float]], *, smoke: bool) -> list[Criterion]:
    """Judge the tail; in a smoke run only that nobody is starved."""
    limit = 25.0 if smoke else _TARGET
    verdicts = []
    for name in NEIGHBOURS:
        share = _share(times[name])
        ratio = percentile(times[name], share) / percentile(times[_QUIET], share)
        what = f"beside a neighbour that {name}: p{share * 100:.0f} is less than {limit:g} times"
        middle = median(times[name]) / median(times[_QUIET])
        verdicts.append(Criterion(what, ratio < limit, f"{ratio:.2f} times, median {middle:.2f}"))
    return verdicts

"""Leaks: a census before and after ten thousand calls, one after the other."""

import time
from array import array
from functools import partial

from ..harness.sandbox.inspection import inspect
from ..harness.sandbox.sandbox import Sandbox
from ..runner.settings import PoolSettings
from .callers import said
from .census import launcher_of, private_bytes
from .leak_checks import (
    MAY_GROW_MIB,
    NOTES,
    LeakCheck,
    censuses,
    own_temporary_files,
    settled,
    told_at_once,
)
from .measuring import median, percentile, percentile_columns, percentile_row, seconds_of
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings, sandbox

_MIB = 1024 * 1024
_READY, _MADE = "a cell stood ready", "one was made on demand"
_TAIL = 5.0
_MEANING = "Calls come faster than cells are made: who finds none makes its own, the tail of all."
_WARM_UP = 200  # the first calls make the objects that are made only once


def measure(settings: Settings) -> Report:
    """Return verdicts on calls one after the other, and on an old launcher."""
    times: dict[str, list[float]] = {_READY: [], _MADE: []}
    with own_temporary_files():
        made = told_at_once(
            check() for check in (
                partial(_one_after_the_other, settings, times), partial(_old_launcher, settings),
            )
        )  # fmt: skip
    return Report(
        name="leaks",
        title="What is left",
        tables=(_calls(times), censuses(made)),
        verdicts=tuple(verdict for each in made for verdict in each.verdicts()),
        notes=(_MEANING, *NOTES),
    )


def _one_after_the_other(settings: Settings, times: dict[str, list[float]]) -> LeakCheck:
    """Call as fast as answers come, which is faster than cells are made: keep `times` of those that
    found one apart."""
    calls = settings.amount(10_000, 300)
    wrong: list[str] = []
    with sandbox(settings) as made:
        for _ in range(min(_WARM_UP, calls)):
            made.execute("print(1)")
        taken, hits = array("d", bytes(8 * calls)), bytearray(calls)  # memory that is there before
        before = settled(made.settle)
        for number in range(calls):
            began = time.perf_counter()
            result = made.execute("print(1)")
            taken[number], hits[number] = time.perf_counter() - began, result.pool_hit
            if result.stdout != "1\n":
                wrong.append(said(result))
        after = settled(made.settle, before)
    for took, hit in zip(taken, hits, strict=True):
        times[_READY if hit else _MADE].append(took)
    further = () if settings.smoke else tuple(_steady(*each) for each in times.items())
    return LeakCheck("one after the other", calls, wrong, before, after, further)


def _steady(name: str, times: list[float]) -> Criterion:
    tail = percentile(times, 0.99) / median(times)
    what = f"one after the other: p99 is less than {_TAIL:g} times the median, {name}"
    seen = f"{tail:.1f} times, median {median(times) * 1000:.2f} ms, {len(times):,} calls"
    return Criterion(what, tail < _TAIL, seen)


def _calls(times: dict[str, list[float]]) -> ReportTable:
    every = {"all": [each for one in times.values() for each in one], **times}
    return ReportTable(
        title="`print(1)`, one after the other",
        columns=(Column("calls"), *percentile_columns()),
        rows=tuple((name, *percentile_row(values)) for name, values in every.items() if values),
    )


def _old_launcher(settings: Settings) -> LeakCheck:
    """Fork on and on from one launcher, and then once more than it may."""
    forks = settings.forks or (200 if settings.smoke else 5000)
    wrong: list[str] = []
    with sandbox(settings, PoolSettings(size=0, cells_per_launcher=forks)) as made:
        for _ in range(min(_WARM_UP, forks // 2)):
            made.execute(SUM.source)
        before, young = settled(made.settle), _launcher_mib(made)
        began = [seconds_of(partial(made.execute, SUM.source)) for _ in range(100)]
        while inspect(made).forks < forks:
            result = made.execute(SUM.source)
            if result.value != 2:
                wrong.append(said(result))
        ended = _launcher_mib(made)
        after, old = settled(made.settle, before), launcher_of(made)
        made.execute(SUM.source)
        recycled = launcher_of(made)[0] != old[0]
    verdicts = (
        Criterion(
            f"an old launcher is within {MAY_GROW_MIB:g} MiB of a young one",
            ended - young <= MAY_GROW_MIB,
            f"{ended - young:+.2f} MiB after {forks:,} forks, median call {median(began) * 1e3:.1f} ms",
        ),
        Criterion("one that has served its time is replaced", recycled, str(recycled)),
    )
    return LeakCheck("an old launcher", forks, wrong, before, after, verdicts)


def _launcher_mib(made: Sandbox) -> float:
    return (private_bytes(launcher_of(made)[2]) or 0) / _MIB

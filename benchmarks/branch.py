"""Branches of sessions by memory, beside a replay of their calls and a fresh session."""

import contextlib
from collections.abc import Callable
from functools import partial

from ..harness.sandbox.session import Session
from .measuring import (
    Contender,
    distribution,
    median,
    percentile_columns,
    percentile_row,
    seconds_of,
    side_by_side,
)
from .report import Column, Criterion, Curves, Report, ReportTable
from .settings import Settings, sandbox
from .twins import Twins, twins

_FRESH, _SMALL, _EIGHT = "a fresh session", "branch, small session", "branch, eight at once, each"
_LARGE, _REPLAY = "branch, 8,000 more pages", "fork by replay of ten calls"
_AT_ONCE = 8
_PAGES = 8_000
_CALL = "class Point:\n    x = 1\npoints = [Point() for _ in range(1000)]"
_PROGRAMS, _SMOKE_PROGRAMS = 500, 3


def measure(settings: Settings) -> Report:
    """Return percentiles of the time until new sessions can be called."""
    with sandbox(settings) as made, made.session() as small, made.session() as large:
        for _ in range(10):
            small.execute(_CALL)
        large.execute(f"{_CALL}\npages = bytearray(b'x') * {_PAGES * 4096}")
        times = side_by_side(
            [
                Contender(_FRESH, partial(_opened, lambda: (made.session(),)), made.settle),
                Contender(_SMALL, partial(_opened, small.branch), made.settle),
                Contender(_EIGHT, partial(_eight, small), made.settle),
                Contender(_LARGE, partial(_opened, large.branch), made.settle),
                Contender(_REPLAY, partial(_opened, lambda: (small.fork(),)), made.settle),
            ],
            settings.amount(300, 5),
        )
    return _report(times, twins(settings, settings.amount(_PROGRAMS, _SMOKE_PROGRAMS)))


def _opened(make: Callable[[], tuple[Session, ...]]) -> float:
    """Return how long it took until the sessions were there; they are closed afterwards."""
    made: list[Session] = []
    with contextlib.ExitStack() as closing:
        seconds = seconds_of(lambda: made.extend(make()))
        for each in made:
            closing.callback(each.close)
            if each.not_copied:
                raise RuntimeError(f"no branch by memory: {each.not_copied}")
    return seconds


def _eight(session: Session) -> float:
    return _opened(partial(session.branch, _AT_ONCE)) / _AT_ONCE


def _report(times: dict[str, list[float]], found: Twins) -> Report:
    fresh = median(times[_FRESH])
    rows = [
        (way, *percentile_row(seconds), median(seconds) / fresh) for way, seconds in times.items()
    ]
    page = (median(times[_LARGE]) - median(times[_SMALL])) / _PAGES * 1e6
    table = ReportTable(
        title="Another session of the same state",
        columns=(Column("until it can be called"), *percentile_columns(), Column("ratio", 2)),
        rows=tuple(rows),
    )
    chart = Curves(
        title="Another session: how many took how long",
        x="milliseconds",
        y="% of sessions",
        lines=tuple(distribution(way, seconds) for way, seconds in times.items()),
        logarithmic=True,
    )
    return Report(
        name="branch",
        title="What it costs to branch a session",
        tables=(table,),
        charts=(chart,),
        verdicts=(
            Criterion(
                "random programs go on in branches as an unbranched twin does",
                found.agreed == found.programs,
                f"{found.agreed} of {found.programs}",
            ),
            Criterion(
                "their branches are made by memory",
                found.by_memory == found.branches,
                f"{found.by_memory} of {found.branches}",
            ),
        ),
        notes=(f"{page:.2f} µs for each page beyond those of the small session.",),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )

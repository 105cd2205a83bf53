"""Measurements of contenders in turn, and their medians and percentiles; no means."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .report import Bar, Column, Curve, Value

MS = 1000.0  # in a second


def _nothing() -> None:
    return


class Contender(NamedTuple):
    """Something that is timed.

    `run` may return the seconds it took, as a float, if it knows better; `prepare` is called before
    every run, outside the clock; who takes long takes part in `every` so many rounds only.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    every: int = 1


def side_by_side(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run.  Every round runs each once, the next round in the opposite
    order, so that a noisy moment hits all of them; each was run once before the clock starts."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.prepare()
        contender.run()
    order = list(contenders)
    for number in range(rounds):
        for contender in order:
            if number % contender.every == 0:
                contender.prepare()
                times[contender.name].append(seconds_of(contender.run))
        order.reverse()
    return times


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    known = run()
    return known if isinstance(known, float) else time.perf_counter() - began


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed: the nearest rank, so one that was seen."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


_QUARTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75}


def quartile_columns(unit: str, digits: int = 2) -> tuple[Column, ...]:
    return tuple(Column(f"{name} {unit}", digits) for name in _QUARTILES)


def quartiles(values: Sequence[float], scale: float = 1.0) -> tuple[float, float, float]:
    """Return the lower one, the median and the upper one."""
    low, middle, high = (percentile(values, share) * scale for share in _QUARTILES.values())
    return low, middle, high


def quartile_bar(label: str, values: Sequence[float], scale: float = 1.0) -> Bar:
    low, middle, high = quartiles(values, scale)
    return Bar(label, middle, low, high)


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def percentile_columns(digits: int = 2) -> tuple[Column, ...]:
    return (*(Column(f"{name} ms", digits) for name in PERCENTILES), Column("runs", 0))


def percentile_row(seconds: Sequence[float]) -> tuple[Value, ...]:
    """Return the percentiles, in milliseconds; one that fewer than two lie beyond is not known."""
    count = len(seconds)
    shares = [
        percentile(seconds, share) * MS if share == 0.5 or count * (1 - share) >= 2 else None
        for share in PERCENTILES.values()
    ]
    return (*shares, count)


_SHARES = (*(n / 100 for n in range(100)), 0.992, 0.994, 0.996, 0.998, 0.999)


def distribution(label: str, seconds: Sequence[float]) -> Curve:
    """Return the share of runs, in percent, over the milliseconds that they did not exceed."""
    return Curve(label, tuple((percentile(seconds, share) * MS, share * 100) for share in _SHARES))

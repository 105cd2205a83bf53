"""Measurements of contenders in turn, and their medians and percentiles; no means."""

import time
from collections.abc import Callable, Sequence
from math import ceil, floor, inf, sqrt
from typing import NamedTuple

from .report import Bar, Column, Curve, Value

MS = 1000.0  # in a second
_FEWEST = 6  # values: fewer do not enclose their median with 95 %
_ASKED = 20  # rounds between two looks at whether it is enough
STEADY = 0.1  # a ratio that is known within so much of itself


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


Times = dict[str, list[float]]


def side_by_side(
    contenders: Sequence[Contender], rounds: int, *, seconds: float = inf,
    is_enough: Callable[[Times], bool] = lambda times: False,
) -> Times:  # fmt: skip
    """Return the seconds of each run.  Every round runs each once, the next round in the opposite
    order, so that a noisy moment hits all of them; each was run once before the clock starts.

    It ends after `rounds`, after `seconds`, or as soon as `is_enough`, which is asked now and then.
    """
    times: Times = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.prepare()
        contender.run()
    order = list(contenders)
    end = time.monotonic() + seconds
    for number in range(rounds):
        if number and (time.monotonic() > end or (number % _ASKED == 0 and is_enough(times))):
            break
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


class Estimate(NamedTuple):
    """A median, or the ratio of two, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float
    rounds: int  # rounds of the contender with fewer

    @property
    def spread(self) -> float:
        """Half the interval, as a share of the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0

    @property
    def is_steady(self) -> bool:
        return self.rounds >= _FEWEST and self.spread < STEADY


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(median(values), *median_interval(values), len(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the ratio of two medians.  Its interval is that of both at their worst, so rather wide."""
    low, high = median_interval(above)
    below_low, below_high = median_interval(below)
    rounds = min(len(above), len(below))
    return Estimate(median(above) / median(below), low / below_high, high / below_low, rounds)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the values that enclose the median of what they were drawn from with a probability of
    95 %: by their ranks, so that no shape is assumed.  Few values enclose it with all of them."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * sqrt(count)
    low, high = floor(count / 2 - reach) - 1, ceil(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


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

"""Checkpoints of a run with faults: the measurements at each, and the criteria for them."""

from collections import Counter
from typing import NamedTuple

from .report import Column, Criterion, ReportTable, Value

# A caller waiting for a cell of a stopped launcher gives up after 20 s, for its end after 20 more; a
# request of which nothing ran is made up to three times.
_LONGEST_SECONDS = 75.0


class Period(NamedTuple):
    """What was seen between two checkpoints, and is there more of at the second one."""

    ends: Counter[str]  # reasons of results, and names of exceptions
    wrong: list[str]
    longest: float
    faults: int
    left: dict[str, float]


def verdicts(name: str, periods: list[Period]) -> tuple[Criterion, ...]:
    """Say whether nothing was left at any, and every call came back."""
    left = [period.left for period in periods if period.left]
    longest = max(period.longest for period in periods)
    return (
        Criterion(
            f"{name}: nothing is left at any checkpoint",
            not left,
            f"at {len(left)} of {len(periods)}{''.join(f'; {each}' for each in left[:3])}",
        ),
        Criterion(
            f"{name}: every call comes back within {_LONGEST_SECONDS:g} s",
            longest < _LONGEST_SECONDS,
            f"longest {longest:.1f} s",
        ),
    )


def row(minutes: float, period: Period) -> tuple[Value, ...]:
    """Return the line of one."""
    ends = ", ".join(f"{count} {what}" for what, count in period.ends.most_common())
    left = str(period.left) if period.left else "nothing"
    return (minutes, period.faults, ends, len(period.wrong), period.longest, left)


def table(rows: list[tuple[Value, ...]]) -> ReportTable:
    """Return what was seen at each checkpoint."""
    head = (
        Column("minutes", 1), Column("faults", 0), Column("calls, by how they ended"),
        Column("wrong", 0), Column("longest s", 1), Column("left"),
    )  # fmt: skip
    return ReportTable(title="At each checkpoint", columns=head, rows=tuple(rows))

"""The report of a benchmark: data for a terminal, a file, a page and a document."""

import msgspec

Value = float | int | str | None  # None: nothing could be measured


class Column(msgspec.Struct, frozen=True):
    """The head of a column; `digits` after the point for its numbers."""

    title: str
    digits: int = 2


class ReportTable(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""


class Bar(msgspec.Struct, frozen=True):
    """One number; `low` and `high` are the quartiles around a median."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Numbers to compare.  `stacked`: each begins where the one before it ends."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    stacked: bool = False
    logarithmic: bool = False


class Curve(msgspec.Struct, frozen=True):
    label: str
    points: tuple[tuple[float, float], ...]


class Curves(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Curves over one axis; with `logarithmic`, the axis below them is."""

    title: str
    x: str
    y: str
    lines: tuple[Curve, ...]
    logarithmic: bool = False


Chart = Bars | Curves


class Criterion(msgspec.Struct, frozen=True):
    """A criterion: what must hold, whether it holds, and what was measured."""

    what: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}  {self.what}: {self.seen}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All results of one benchmark.

    `brief` is the table that the main README has room for, `headlines` those at the top of the results;
    `samples` are single measurements, in seconds;
    `quiet` tells whether others left the machine alone meanwhile.
    """

    name: str
    title: str
    machine: str = ""
    quiet: bool = True
    tables: tuple[ReportTable, ...] = ()
    brief: tuple[ReportTable, ...] = ()
    headlines: tuple[ReportTable, ...] = ()
    charts: tuple[Chart, ...] = ()
    verdicts: tuple[Criterion, ...] = ()
    notes: tuple[str, ...] = ()
    samples: dict[str, tuple[float, ...]] = {}


def shown(value: Value, digits: int) -> str:
    """Return a value with its digits and separators; "-" if it could not be measured."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"

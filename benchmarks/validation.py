"""The cost of a source check: the first time, when it is parsed, and the second, when it is cached.

Every first sight is of a source that differs in its last line.
"""

from collections.abc import Callable
from functools import partial

from ..policies.source.check import MAX_CHARACTERS, check
from .measuring import median, seconds_of
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings

_PROGRAM = """import json
import math


def total(rows):
    sums = {}
    for row in rows:
        key = row["name"].strip().lower()
        sums[key] = sums.get(key, 0) + float(row["amount"])
    return sums


class Report:
    def __init__(self, rows):
        self.sums = total(rows)

    def text(self):
        return "\\n".join(f"{key}: {value:.2f}" for key, value in sorted(self.sums.items()))


print(Report([{"name": f"n{n}", "amount": n * math.pi} for n in range(10)]).text(), json.dumps(1))
"""


def _longest(text: str) -> str:
    return text * ((MAX_CHARACTERS - 20) // len(text))


_SOURCES = {
    f"{len(_PROGRAM.splitlines())} lines": _PROGRAM,
    "1,000 lines": _PROGRAM * (1000 // len(_PROGRAM.splitlines())),
    "256 Ki characters of programs": _longest(_PROGRAM),
    "256 Ki characters, chains of attributes": _longest("a" + ".b" * 250 + "\n"),
    "256 Ki characters, chains of calls": _longest("f" + "()" * 900 + "\n"),
    "256 Ki characters, a finding a line": _longest("eval\n"),
}


def measure(settings: Settings) -> Report:
    """Return the medians for ordinary programs and for the longest and worst there are."""
    runs = settings.amount(1000, 50)
    rows = [_row(name, source, runs) for name, source in _SOURCES.items()]
    table = ReportTable(
        title="One check, microseconds",
        columns=(Column("source"), Column("first p50 us", 0), Column("second p50 us", 1)),
        rows=tuple(rows),
    )
    known = Criterion(
        "a known source costs less than a tenth of a new one",
        all(float(first or 0) > 10 * float(second or 0) for _, first, second in rows),
        ", ".join(
            f"{float(first or 0) / float(second or 1):.0f} times" for _, first, second in rows
        ),
    )
    return Report(
        name="validation", title="What a source check costs", tables=(table,), verdicts=(known,)
    )


def _row(name: str, source: str, runs: int) -> tuple[Value, Value, Value]:
    few = max(3, min(runs, runs * len(_PROGRAM) // len(source)))
    first = _median_us(lambda number: check(f"{source}#{number}"), few)
    check(source)
    return name, first, _median_us(lambda _: check(source), few)


def _median_us(look: Callable[[int], object], runs: int) -> float:
    return median([seconds_of(partial(look, number)) for number in range(runs)]) * 1e6

"""The profile of a tool call from a cell: CPU time on both sides, and Python calls of the host."""

import sys
import time
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

from .measuring import median
from .reach import audited
from .report import Column, ReportTable, Value
from .round_trips import echo, seconds_of_round_trip
from .settings import Settings

_US = 1e6
_LOOP = """
import time
from tools import observed
def measured():
    began, cpu = time.perf_counter(), time.process_time()
    for n in range({count}):
        observed(n=n)
    return (time.perf_counter() - began) / {count}, (time.process_time() - cpu) / {count}
measured()
"""


class CallCosts(NamedTuple):
    """Seconds of one call."""

    wall: float
    host: float  # CPU time of the thread that executes the tool
    guest: float


class _Observer:
    """A tool that notes the CPU time of its thread, or the Python calls that this thread makes."""

    def __init__(self, counted: int = 0) -> None:
        """Count Python calls until it was called `counted` times."""
        self.moments: list[float] = []
        self.counts: list[Counter[str]] = []
        self._counted = counted
        self._calls: Counter[str] = Counter()

    def observed(self, n: int) -> int:
        """Add one."""
        self.moments.append(time.thread_time())
        if self._counted:
            sys.setprofile(None)  # first: to copy a Counter takes four Python calls
            self.counts.append(self._calls.copy())
            if len(self.counts) < self._counted:
                sys.setprofile(self._note)
        return n + 1

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._calls[frame.f_code.co_filename] += 1


def measure(settings: Settings) -> tuple[ReportTable, Counter[str]]:
    """Return a table of the costs of a call, and the Python calls of the host for one, by file."""
    count, rounds = settings.amount(300, 20), settings.amount(20, 2)
    observer = _Observer()
    costs: list[CallCosts] = []
    trips: list[float] = []
    with audited(settings, tools=[observer.observed]) as made, echo() as end:
        for _ in range(rounds):
            observer.moments.clear()
            result = made.execute(_LOOP.format(count=count))
            if not result.ok:
                raise RuntimeError(result.error)
            wall, guest = result.value
            host = (observer.moments[-1] - observer.moments[0]) / (count - 1)
            costs.append(CallCosts(wall, host, guest))
            trips.append(seconds_of_round_trip(end, count))
    return table(costs, trips), _python_calls(settings)


def _python_calls(settings: Settings) -> Counter[str]:
    """Return the Python calls of the host for the call that took fewest, by file."""
    count = 20
    observer = _Observer(count)
    with audited(settings, tools=[observer.observed]) as made:
        result = made.execute(_LOOP.format(count=count))
    if not result.ok:
        raise RuntimeError(result.error)
    pairs = zip(observer.counts[1:], observer.counts[2:], strict=False)
    return min((after - before for before, after in pairs), key=Counter.total)


def table(costs: list[CallCosts], trips: list[float]) -> ReportTable:
    wall, host, guest = (median(each) for each in zip(*costs, strict=True))
    trip = median(trips)
    rows: list[tuple[Value, ...]] = [
        ("a call", wall * _US, wall / trip),
        ("CPU time of the host's thread", host * _US, host / trip),
        ("CPU time of the program", guest * _US, guest / trip),
        (
            "until the other side runs: two wake-ups",
            (wall - host - guest) * _US,
            (wall - host - guest) / trip,
        ),
        ("a round trip between two Pythons through a socketpair", trip * _US, 1.0),
    ]
    return ReportTable(
        title="A tool call from a cell",
        columns=(Column("what"), Column("us", 1), Column("of a round trip")),
        rows=tuple(rows),
        note=f"Medians of {len(costs)} times many calls; both sides' CPU time has their system calls.",
    )

"""The cost of a ready cell and of an open session: memory, descriptors, latency beside many."""

import glob
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..harness.sandbox.sandbox import Sandbox
from ..runner.settings import PoolSettings, SessionSettings
from .census import guests_of, launcher_of, private_bytes
from .measuring import Contender, median, percentile, side_by_side
from .report import Column, Criterion, Curve, Curves, Report, ReportTable, Value
from .settings import Settings, sandbox

_SIZES, _SMOKE_SIZES = (1, 10, 100, 300, 1000), (1, 16)
_MIB = 1024 * 1024
_SECONDS = 30.0  # after which no larger size begins
Found = TypeVar("Found")
_SPARE = 200  # descriptors for everything else
_PER_CELL = 16


class Parked(NamedTuple):
    """What a number of parked cells was seen to take."""

    cells: int
    fill_seconds: float
    private: list[float]  # MiB of each guest's process
    charged: list[float]  # MiB of each cgroup
    ours_mib: float  # counts this process only
    launcher_mib: float
    descriptors: int


def measure(settings: Settings) -> Report:
    """Return memory of parked cells, for pools of growing size."""
    allowed = (_raise_descriptors() - _SPARE) // _PER_CELL
    sizes = [size for size in (_SMOKE_SIZES if settings.smoke else _SIZES) if size <= allowed]
    sessions = list(_in_time(partial(_keep, settings), sizes))
    return _report(list(_in_time(partial(_park, settings), sizes)), sessions)


def _in_time(measured: Callable[[int], Found], sizes: list[int]) -> Iterator[Found]:
    """Yield what is measured of each size; a slow machine does without the largest."""
    end = time.monotonic() + _SECONDS
    for size in sizes:
        if time.monotonic() < end:
            yield measured(size)


def _raise_descriptors() -> int:
    """Allow this process as many descriptors as it may have; return how many that is."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _park(settings: Settings, size: int) -> Parked:
    before, open_before = private_bytes(os.getpid()) or 0, len(os.listdir("/proc/self/fd"))
    pool = PoolSettings(size=size, low_water=size, memory_bytes=2**50)
    began = time.perf_counter()
    with sandbox(settings, pool) as made:
        seconds = time.perf_counter() - began
        return Parked(
            len(guests_of(made)),
            seconds,
            [(private_bytes(pid) or 0) / _MIB for pid in guests_of(made)],
            _charged(),
            ((private_bytes(os.getpid()) or 0) - before) / _MIB,
            _of_launcher(made),
            len(os.listdir("/proc/self/fd")) - open_before,
        )


class SessionCosts(NamedTuple):
    """What a number of idle sessions was seen to take, and to cost others."""

    sessions: int
    open_seconds: float
    private: list[float]
    charged: list[float]
    fresh: list[float]  # seconds of calls that have nothing to do with any session
    again: list[float]  # seconds of requests to the sessions, each in turn


def _keep(settings: Settings, size: int) -> SessionCosts:
    """Open sessions that have a variable, and let them wait."""
    runs = settings.amount(200, 10)
    with sandbox(settings, sessions=SessionSettings(alive=size)) as made:
        began = time.perf_counter()
        sessions = [made.session() for _ in range(size)]
        for session in sessions:
            session.execute("x = 1")
        seconds = time.perf_counter() - began
        made.settle()
        parked = PoolSettings().size
        private = [(private_bytes(pid) or 0) / _MIB for pid in guests_of(made)]
        charged = _charged()
        turns = itertools.cycle(sessions)
        times = side_by_side(
            [
                Contender("fresh", partial(made.execute, "1+1"), made.settle),
                Contender("again", lambda: next(turns).execute("x + 1")),
            ],
            runs,
        )
        # Those that used memory most are the sessions, beside cells that only stand ready.
        largest = sorted(private)[-size:] if len(private) >= size + parked else private
        return SessionCosts(
            size, seconds, largest, sorted(charged)[-size:], times["fresh"], times["again"]
        )


def _of_launcher(made: Sandbox) -> float:
    return sum(private_bytes(pid) or 0 for pid in launcher_of(made)) / _MIB


def _charged() -> list[float]:
    """Return what each of our cells' cgroups is charged, kernel memory included where it counts it."""
    ours = f"/sys/fs/cgroup/**/cellwright-{os.getpid()}-*/cell-*"
    files = [
        *glob.glob(f"{ours}/memory.usage_in_bytes", recursive=True),  # v1
        *glob.glob(f"{ours}/memory.current", recursive=True),
    ]
    return [int(Path(file).read_text()) / _MIB for file in files]


def _report(found: list[Parked], kept: list[SessionCosts]) -> Report:
    titles = ("private p50 MiB", "private p99 MiB", "charged p50 MiB")
    table = ReportTable(
        title="Cells that stand ready",
        columns=(
            Column("cells", 0), *(Column(title) for title in titles), Column("of this process, KiB", 0),
            Column("launcher MiB", 1), Column("descriptors", 1), Column("seconds to fill", 1),
        ),
        rows=tuple(map(_row, found)),
        note="Private and charged: of one cell.  This process, descriptors: for each cell.",
    )  # fmt: skip
    points = tuple((float(each.cells), sum(each.private)) for each in found)
    idle = tuple((float(each.sessions), sum(each.private)) for each in kept)
    lines = (Curve("cells that stand ready", points), Curve("idle sessions", idle))
    return Report(
        name="density",
        title="Memory of cells that stand ready, and of sessions",
        tables=(table, _sessions(kept)),
        charts=(Curves(title="Private memory", x="cells", y="MiB", lines=lines),),
        verdicts=_verdicts(found),
        notes=(
            "Private: Private_Clean and Private_Dirty of the guest's process, after its rehearsal.",
            "Charged: what the cell's memory cgroup counts; it has pages that another shares with it.",
        ),
    )


def _sessions(kept: list[SessionCosts]) -> ReportTable:
    titles = ("private p50 MiB", "private p99 MiB", "charged p50 MiB", "open and first call s")
    return ReportTable(
        title="Idle sessions, and calls beside them",
        columns=(
            Column("sessions", 0), *(Column(title) for title in titles), Column("a fresh call p50 ms"),
            Column("a request p50 ms"),
        ),
        rows=tuple(
            (
                each.sessions, median(each.private), percentile(each.private, 0.99),
                median(each.charged) if each.charged else None, each.open_seconds,
                median(each.fresh) * 1e3, median(each.again) * 1e3,
            )
            for each in kept
        ),
        note="A request goes to the sessions in turn; a fresh call finds a cell ready.",
    )  # fmt: skip


def _row(each: Parked) -> tuple[Value, ...]:
    return (
        each.cells,
        median(each.private),
        percentile(each.private, 0.99),
        median(each.charged) if each.charged else None,
        each.ours_mib * 1024 / each.cells,
        each.launcher_mib,
        each.descriptors / each.cells,
        each.fill_seconds,
    )


def _verdicts(found: list[Parked]) -> tuple[Criterion, ...]:
    first, last = median(found[0].private), median(found[-1].private)
    return (
        Criterion(
            "a cell among many takes no more memory than one alone, within a quarter",
            last <= first * 1.25,
            f"{last / first:.2f} times",
        ),
    )

"""What a cell costs that stands ready: memory of its own, what its cgroup is charged, descriptors."""

import glob
import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

from ..harness.sandbox import Sandbox
from ..runner.pool import PoolSettings
from .census import guests_of, launcher_of, private_bytes
from .measuring import median, percentile
from .report import Column, Line, Lines, Report, Table, Value, Verdict
from .settings import Settings, sandbox

_SIZES, _SMOKE_SIZES = (1, 10, 100, 300, 1000), (1, 16)
_MIB = 1024 * 1024
_SPARE = 200  # descriptors for everything else
_PER_CELL = 16


class Parked(NamedTuple):
    """What a number of parked cells was seen to take."""

    cells: int
    fill_seconds: float
    private: list[float]  # MiB of each guest's process
    charged: list[float]  # MiB of each cgroup
    ours_mib: float  # of this process
    launcher_mib: float
    descriptors: int


def measure(settings: Settings) -> Report:
    """Return memory of parked cells, for pools of growing size."""
    allowed = (_raise_descriptors() - _SPARE) // _PER_CELL
    sizes = [size for size in (_SMOKE_SIZES if settings.smoke else _SIZES) if size <= allowed]
    return _report([_park(settings, size) for size in sizes])


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


def _report(found: list[Parked]) -> Report:
    titles = ("private p50 MiB", "private p99 MiB", "charged p50 MiB")
    table = Table(
        title="Cells that stand ready",
        columns=(
            Column("cells", 0), *(Column(title) for title in titles), Column("of this process, KiB", 0),
            Column("launcher MiB", 1), Column("descriptors", 1), Column("seconds to fill", 1),
        ),
        rows=tuple(map(_row, found)),
        note="Private and charged: of one cell.  This process, descriptors: for each cell.",
    )  # fmt: skip
    points = tuple((float(each.cells), sum(each.private)) for each in found)
    lines = (Line("private memory of guests", points),)
    return Report(
        name="density",
        title="Memory of cells that stand ready",
        tables=(table,),
        charts=(Lines(title="Parked cells", x="cells", y="MiB", lines=lines),),
        verdicts=_verdicts(found),
        notes=(
            "Private: Private_Clean and Private_Dirty of the guest's process, after its rehearsal.",
            "Charged: what the cell's memory cgroup counts; it has pages that another shares with it.",
        ),
    )


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


def _verdicts(found: list[Parked]) -> tuple[Verdict, ...]:
    first, last = median(found[0].private), median(found[-1].private)
    return (
        Verdict(
            "a cell among many takes no more memory than one alone, within a quarter",
            last <= first * 1.25,
            f"{last / first:.2f} times",
        ),
    )

"""A model of the cells a second that a number of processors makes, from a few measured parameters.

A call takes the time under the kernel's lock of cgroups, and beside it the longest of three: what a
supervisor needs of its processor, divided by the supervisors; what the calling process needs of its
own; what all processes need, divided by the capacity of the processors (asymptotic bounds).  The time
under the lock is added, because processors that wait for it spin and do nothing else: that is Amdahl's
law, and so is the capacity.  `serial_share` finds the serial parts, from one process and many.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

SIZES = (1, 2, 4, 8, 16, 32, 64)
CALLERS_EACH = 4  # callers for each processor
WITHIN = 0.15  # a prediction is right within so much of what was measured
_MACHINES = Path(__file__).with_name("machines.toml")
_MS = 1000.0

SUPERVISOR = "Python's lock in each supervisor"
CALLER = "Python's lock in the calling process"
PROCESSORS = "all processors"
CGROUPS = "the kernel's lock of cgroups"


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of one machine."""

    supervisor_ms: float  # CPU time of a supervisor for a call
    cell_ms: float  # CPU time of all processes for a call
    serial_share: float  # part of the work that processors do one at a time
    new_ms: float  # time under the kernel's lock of a call with a new cgroup
    used_ms: float  # and of one with a used cgroup
    calling_ms: float = 0.0  # CPU time of the calling process for a call that a worker carries out
    bubblewrap_ms: float = 0.0
    alone_ms: float = 0.0  # latency of a call that finds a cell ready
    process_mib: float = 0.0  # private memory of the calling process
    launcher_mib: float = 0.0  # of a keeper, nursery and launcher, which each supervisor has
    worker_mib: float = 0.0  # of a worker's process
    cell_mib: float = 0.0  # of a cell that stands ready
    pool: int = 8  # cells that stand ready in one supervisor

    def capacity(self, processors: int) -> float:
        """Return how many times the work of one processor so many do."""
        return processors / (1 + self.serial_share * (processors - 1))


class Prediction(msgspec.Struct, frozen=True):
    rate: float  # cells a second
    limit: str


def serial_ms(rates: Mapping[int, float]) -> float:
    """Return the milliseconds of each call that processes do one at a time, from calls a second of one
    process and of the most that were tried."""
    most = max(rates)
    return max(0.0, (most / rates[most] - 1 / rates[1]) / (most - 1)) * _MS if most > 1 else 0.0


def serial_share(rates: Mapping[int, float]) -> float:
    """Return the same as a part of the work of a call (Karp and Flatt, CACM 33(5), 1990)."""
    return serial_ms(rates) * rates[1] / _MS


def workers_for(processors: int) -> int:
    """Return how many supervisors `workers="auto"` is (harness/sandbox/checks.py)."""
    return max(1, processors // 2)


def predicted(
    given: Parameters, processors: int, supervisors: int, *, lock_ms: float, placed: bool = False
) -> Prediction:
    """Return the cells a second; with `placed` the supervisors are workers of one process."""
    parts = {
        SUPERVISOR: given.supervisor_ms / supervisors,
        CALLER: given.calling_ms if placed else 0.0,
        PROCESSORS: (given.cell_ms + given.calling_ms * placed) / given.capacity(processors),
    }
    limit = max(parts, key=parts.__getitem__)
    taken = parts[limit] + lock_ms
    return Prediction(_MS / taken, CGROUPS if lock_ms > parts[limit] else limit)


def memory_mib(given: Parameters, processors: int, workers: int) -> float:
    """Return the private memory of a sandbox with so many workers, 1 being the process itself, whose
    callers all run a cell."""
    ready = max(given.pool, workers)
    cells = ready + CALLERS_EACH * processors
    supervisors = workers * given.launcher_mib + (workers if workers > 1 else 0) * given.worker_mib
    return given.process_mib + supervisors + cells * given.cell_mib


class MeasuredRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate that was measured: of so many supervisors, or of bubblewrap on `busy` processors."""

    of: str
    measured: float
    supervisors: int = 0
    busy: int = 0
    cgroups: str = ""  # "none", or as most of the machine
    beyond: str = ""  # why the model does not describe it


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine of machines.toml."""

    name: str
    kernel: str
    date: str
    processors: int
    cgroups: str
    bare: dict[int, float]
    new: dict[int, float]
    used: dict[int, float]
    parameters: dict[str, float]
    rates: tuple[MeasuredRate, ...]

    def given(self) -> Parameters:
        """Return the parameters; the serial time of a bare process is in the capacity already."""
        bare = serial_ms(self.bare)
        found = {
            "serial_share": serial_share(self.bare),
            "new_ms": serial_ms(self.new) - bare,
            "used_ms": serial_ms(self.used) - bare,
        }
        return msgspec.convert({**self.parameters, **found}, Parameters)

    def predicted(self, rate: MeasuredRate) -> float:
        given = self.given()
        if rate.busy:
            return given.capacity(rate.busy) * _MS / given.bubblewrap_ms
        kinds = {"none": 0.0, "used": given.used_ms, "new": given.new_ms}
        lock = kinds[rate.cgroups or self.cgroups]
        return predicted(given, self.processors, rate.supervisors, lock_ms=lock).rate


def machines() -> tuple[Machine, ...]:
    """Return the machines of machines.toml."""
    found: dict[str, Any] = tomllib.loads(_MACHINES.read_text())
    return tuple(msgspec.convert(each, Machine, strict=False) for each in found["machine"])

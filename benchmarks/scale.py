"""Fresh cells a second by processes, threads and processors, with bubblewrap beside them, what limits
each, and a model of machines with more processors.

A process has a sandbox of its own; its supervisor, launcher and nursery each use one processor at most.
If none of them is busy, and the machine is not, calls wait for a lock: of the kernel, which makes and
removes cgroups by turns, or of other programs.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..runner.settings import PoolSettings
from . import scale_loops, scale_model
from .census import GUEST, KEEPER, LAUNCHER, NURSERY, WORKER, private_bytes, roles_below
from .commandlines import bubblewrap
from .interference import adopted_orphans
from .measuring import MS, Contender, median, side_by_side
from .parallel import ServedSandbox, ServingProcess, Together, Turn, together
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable, Value
from .scale_model import CALLERS_EACH, SIZES, WITHIN, Parameters, predicted, workers_for
from .settings import Settings, sandbox
from .throughput import ThroughputContender, cpu_of_children, of_command, turn

_THREADS = (1, 2, 4)
_USED, _NEW = "a sandbox in each process", "the same, a new cgroup for each cell"
_BUBBLEWRAP = "bwrap --unshare-all python3 -I -S"
_BUSY = 0.85  # a processor, or all, that is not idle for so much of the time limits the rate
_MIB = 1024 * 1024
Key = tuple[str, int, int]  # contender, processes, threads of each
Found = tuple[float, str]  # calls a second, and what limits them


class Grown(NamedTuple):
    """What was measured on a number of processors."""

    one: float  # calls a second of one sandbox
    auto: float  # the same with as many workers as workers="auto" is


def measure(settings: Settings) -> Report:
    """Return rates and limits; the contenders take turns."""
    counts = _counts()
    turns: dict[Key, list[Found]] = {}
    with adopted_orphans():
        single = _turns_of_all(settings, counts, turns)
        given = _parameters(settings, counts[-1], single)
        grown = {count: _grown(settings, count) for count in counts}
    return _report({key: _middle(found) for key, found in turns.items()}, given, grown)


def _counts() -> list[int]:
    """Return 1, 2, 4 and so on, up to the number of processors."""
    processors = len(os.sched_getaffinity(0))
    return [1 << n for n in range(processors.bit_length())]


# Processes and threads on all processors


def _turns_of_all(
    settings: Settings, counts: list[int], turns: dict[Key, list[Found]]
) -> list[Together]:
    """Add the turns by contender, processes and threads; return those of one process with used cgroups
    and as many threads as there are."""
    single = []
    with ExitStack() as stack:
        kinds = {
            _USED: ServedSandbox(settings.policy),
            _NEW: ServedSandbox(settings.policy, cells_per_cgroup=1),
        }
        made = {
            name: [stack.enter_context(ServingProcess(kind)) for _ in range(counts[-1])]
            for name, kind in kinds.items()
        }
        for _ in range(settings.amount(5, 1)):
            for count in counts:
                for key, spent, found in _turns(settings, made, count):
                    turns.setdefault(key, []).append(found)
                    if spent and key == (_USED, 1, _THREADS[-1]):
                        single.append(spent)
    return single


def _turns(
    settings: Settings, made: dict[str, list[ServingProcess]], count: int
) -> Iterator[tuple[Key, Together | None, Found]]:
    seconds = 0.2 if settings.smoke else 1.5
    for threads in _THREADS:
        for name, processes in made.items():
            idle = _idle_seconds()
            spent = together(processes[:count], Turn(threads, seconds))
            limit = _limit(spent, _idle_seconds() - idle)
            yield (name, count, threads), spent, (spent.rate, limit)
        if command := bubblewrap("-I", "-S", "-c", SUM.source):
            bare = ThroughputContender(_BUBBLEWRAP, of_command(command), cpu_of_children)
            rate = turn(bare, count * threads, seconds).rate
            yield (_BUBBLEWRAP, 1, count * threads), None, (rate, "")


def _idle_seconds() -> float:
    """Return the idle time of all processors together (proc_stat(5))."""
    with open("/proc/stat") as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def _limit(spent: Together, idle: float) -> str:
    wall = max(each.wall for each in spent.spent)
    busy = 1 - idle / (wall * (os.cpu_count() or 1))
    shares = {
        role: max(getattr(each, role) / each.wall for each in spent.spent)
        for role in ("supervisor", "launcher", "nursery")
    }
    busiest = max(shares, key=shares.__getitem__)
    if busy >= _BUSY:
        return "all processors"
    return busiest if shares[busiest] >= _BUSY else f"a lock, or waking up: {busy:.0%} busy"


def _middle(found: list[Found]) -> Found:
    """Return the median of the rates, and the limit of the turn next to it."""
    rate = median([each for each, _ in found])
    return rate, min(found, key=lambda each: abs(each[0] - rate))[1]


# The growth with processors


def _grown(settings: Settings, processors: int) -> Grown:
    """Measure one sandbox, and one with workers, on so many processors."""
    seconds, callers = 0.2 if settings.smoke else 1.5, CALLERS_EACH * processors
    workers = workers_for(processors)
    with _on(processors), ExitStack() as stack:
        served = [ServedSandbox(settings.policy, count) for count in sorted({1, workers})]
        made = [stack.enter_context(ServingProcess(each)) for each in served]
        rates: list[list[float]] = [[] for _ in made]
        for _ in range(settings.amount(3, 1)):
            for process, found in zip(made, rates, strict=True):
                found.append(together([process], Turn(callers, seconds)).rate)
    return Grown(median(rates[0]), median(rates[-1]))


@contextlib.contextmanager
def _on(processors: int) -> Iterator[None]:
    """Have processes that are started in the block use so many processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:processors])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _parameters(settings: Settings, processors: int, single: list[Together]) -> Parameters:
    parts = [each.cpu_ms() for each in single]
    bare = _loop_rates(settings, scale_loops.PROCESS, processors)
    cgroups = _loop_rates(settings, scale_loops.CGROUP, processors)
    with sandbox(settings, workers=2) as made:
        process, worker, launcher, cell = _memory(2)
        alone = _alone_ms(settings, made)
    return Parameters(
        supervisor_ms=median([each[0] for each in parts]),
        cell_ms=median([sum(each) for each in parts]),
        calling_ms=_calling_ms(settings),
        serial_share=scale_model.serial_share(bare),
        new_ms=scale_model.serial_ms(cgroups), used_ms=0.0, alone_ms=alone,
        process_mib=process, worker_mib=worker, launcher_mib=launcher, cell_mib=cell,
        pool=PoolSettings().size,
    )  # fmt: skip


def _loop_rates(settings: Settings, kind: str, processors: int) -> dict[int, float]:
    """Return the rates of one process and of one for each processor, which take turns."""
    counts, seconds = (1, processors) if processors > 1 else (1,), 0.2 if settings.smoke else 1.0
    rates: dict[int, list[float]] = {}
    for _ in range(settings.amount(3, 1)):
        for count in counts:
            rates.setdefault(count, []).append(scale_loops.rate(kind, count, seconds))
    return {count: median(found) for count, found in rates.items()}


def _calling_ms(settings: Settings) -> float:
    """Return the CPU time of the calling process for a call that one of two workers carries out."""
    seconds = 0.2 if settings.smoke else 1.5
    with ServingProcess(ServedSandbox(settings.policy, workers=2)) as process:
        turns = [
            together([process], Turn(2 * CALLERS_EACH, seconds))
            for _ in range(settings.amount(3, 1))
        ]
    return median([each.cpu_ms()[0] for each in turns])


def _memory(workers: int) -> tuple[float, float, float, float]:
    """Return the private MiB of this process, and of a worker, of its launcher with keeper and nursery,
    and of a ready cell."""
    sizes: dict[str, list[float]] = {}
    for role, pid in roles_below(os.getpid()):
        sizes.setdefault(role, []).append((private_bytes(pid) or 0) / _MIB)
    launchers = sum(sum(sizes[role]) for role in (KEEPER, NURSERY, LAUNCHER))
    own = (private_bytes(os.getpid()) or 0) / _MIB
    return own, sum(sizes[WORKER]) / workers, launchers / workers, median(sizes[GUEST])


def _alone_ms(settings: Settings, made: Sandbox) -> float:
    call = Contender("", partial(made.execute, SUM.source), made.settle)
    return median(side_by_side([call], settings.amount(100, 5))[""]) * MS


# The report

_MEANING = (
    'A sandbox with workers="auto". Measured rows ran on so many processors of the machine, and the'
    " model has its parameters from all of them. Memory is by the model, latency with many callers by"
    " Little's law; a call alone finds a cell ready."
)


def _report(turns: dict[Key, Found], given: Parameters, grown: dict[int, Grown]) -> Report:
    best = {
        name: max(found[0] for key, found in turns.items() if key[0] == name) for name, *_ in turns
    }
    bare = best.get(_BUBBLEWRAP, 0.0)
    rows: list[tuple[Value, ...]] = [
        (*key, rate, rate / bare if bare else None, limit) for key, (rate, limit) in turns.items()
    ]
    table = ReportTable(
        title="`1+1` in a fresh cell: calls a second by processes and threads",
        columns=(
            Column("contender"), Column("processes", 0), Column("threads of each", 0),
            Column("calls/s", 0), Column("of the best of bwrap", 2), Column("limit"),
        ),
        rows=tuple(rows),
        note=f"Medians over turns; {os.cpu_count()} processors.",
    )  # fmt: skip
    faster = Criterion(
        "used cgroups make more cells a second than new ones",
        best[_USED] > best[_NEW],
        f"{best[_USED] / best[_NEW]:.2f} times, the best of each",
    )
    return Report(
        name="scale",
        title="Every processor busy",
        tables=(
            table, _growth(f"Growth with processors: {os.cpu_count()} here", given, grown),
            _of_parameters(given), *_elsewhere(),
        ),
        verdicts=(faster, _agrees(given, grown)),
        notes=(
            "A limit is a process that uses a processor of its own, or what all wait for.",
            "The model is in scale_model.py, and what was measured elsewhere in machines.toml.",
        ),
    )  # fmt: skip


def _growth(
    title: str,
    given: Parameters,
    grown: dict[int, Grown],
    new_rates: dict[int, float] | None = None,
) -> ReportTable:
    """Return the table; `grown` and `new_rates`, of sandboxes with new cgroups, were measured."""
    rows: list[tuple[Value, ...]] = []
    for processors in SIZES:
        workers, found = workers_for(processors), grown.get(processors)
        one = predicted(given, processors, 1, lock_ms=given.used_ms)
        auto, new = (
            predicted(given, processors, workers, lock_ms=lock, placed=workers > 1)
            for lock in (given.used_ms, given.new_ms)
        )
        rate = found.auto if found else auto.rate
        rows.append((
            processors, "measured" if found else "predicted", workers, rate, auto.rate,
            found.one if found else one.rate, new.rate,
            (new_rates or {}).get(processors), given.alone_ms,
            CALLERS_EACH * processors / rate * MS,
            scale_model.memory_mib(given, processors, workers), auto.limit, new.limit,
        ))  # fmt: skip
    return ReportTable(
        title=title,
        columns=(
            Column("processors", 0), Column("calls/s are"), Column("workers", 0), Column("calls/s", 0),
            Column("by the model", 0), Column("without workers", 0),
            Column("with new cgroups, by the model", 0), Column("measured", 0), Column("ms, alone"),
            Column(f"ms, {CALLERS_EACH} callers a processor"), Column("MiB", 0), Column("limit"),
            Column("limit with new cgroups"),
        ),
        rows=tuple(rows),
        note=_MEANING,
    )  # fmt: skip


def _of_parameters(given: Parameters) -> ReportTable:
    rows: tuple[tuple[Value, ...], ...] = (
        ("CPU ms of a supervisor for a call", given.supervisor_ms),
        ("CPU ms of the calling process for a call that a worker carries out", given.calling_ms),
        ("CPU ms of all processes for a call", given.cell_ms),
        ("share of starting processes that is serial", given.serial_share),
        ("ms under the kernel's lock to make and remove a cgroup", given.new_ms),
        ("ms of a call that finds a cell ready", given.alone_ms),
        ("private MiB of the calling process", given.process_mib),
        ("private MiB of a worker's process", given.worker_mib),
        ("private MiB of a keeper, nursery and launcher", given.launcher_mib),
        ("private MiB of a cell", given.cell_mib),
    )
    return ReportTable(
        title="Parameters of the model, measured here",
        columns=(Column("parameter"), Column("value", 3)),
        rows=rows,
    )


def _elsewhere() -> Iterator[ReportTable]:
    """Yield what the model says of machines that were measured by hand, and of their growth."""
    for machine in scale_model.machines():
        rows: list[tuple[Value, ...]] = []
        for each in machine.rates:
            found = machine.predicted(each)
            off = f"{found / each.measured - 1:+.0%}"
            rows.append((each.of, each.measured, found, off, each.beyond))
        yield ReportTable(
            title=f"The model on another machine: {machine.name}; {machine.kernel}; {machine.date}",
            columns=(
                Column("calls/s of"), Column("measured", 0), Column("predicted", 0), Column("off"),
                Column("beyond the model"),
            ),
            rows=tuple(rows),
        )  # fmt: skip
        yield growth_of(machine)


def growth_of(machine: scale_model.Machine) -> ReportTable:
    """Return the growth of a machine that was measured by hand, with the best rate with new cgroups
    and as many sandboxes as there would be workers."""
    here = machine.processors
    alike = [
        each.measured for each in machine.rates
        if each.supervisors == workers_for(here) and each.cgroups in ("", "new")
    ]  # fmt: skip
    return _growth(f"Growth of {machine.name}", machine.given(), {}, {here: max(alike)})


def _agrees(given: Parameters, grown: dict[int, Grown]) -> Criterion:
    off = {}
    for processors, found in grown.items():
        workers = workers_for(processors)
        model = predicted(given, processors, workers, lock_ms=given.used_ms, placed=workers > 1)
        off[processors] = model.rate / found.auto - 1
    seen = ", ".join(f"{count}: {each:+.0%}" for count, each in off.items())
    return Criterion(
        f"the model is within {WITHIN:.0%} of what was measured, by processors",
        all(abs(each) <= WITHIN for each in off.values()),
        seen,
    )

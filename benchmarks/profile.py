"""The profile of a run: CPU time, page faults and system calls by process, the host's Python calls.

Then of what else has a goal that is missed: a cold command, and a tool call.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..runner.requests.result import SandboxResult
from ..runner.settings import PoolSettings
from . import profile_call, profile_command
from .census import GUEST, INIT, KEEPER, LAUNCHER, NURSERY, every_process, launcher_of, stat_of
from .measuring import MS, percentile_columns, percentile_row
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings, sandbox

_SUPERVISOR, _KERNEL = "supervisor", "kernel threads"
_ROLES = (_SUPERVISOR, KEEPER, NURSERY, INIT, LAUNCHER, GUEST, _KERNEL)
_ROWS = 20  # modules that make most calls
_POOL = PoolSettings(cells_per_launcher=10**6)
_PACKAGE = Path(__file__).resolve().parent.parent
_COUNTED = "raw_syscalls:sys_enter"
_PHASES = ("lease", "send", "run", "reply", "teardown")


class Use(NamedTuple):
    """What processes of one kind used."""

    seconds: float
    faults: int


def measure(settings: Settings) -> Report:
    """Return tables of runs whose cell stood ready, the making of the next cell included."""
    runs = settings.amount(500, 50)
    with sandbox(settings, _POOL) as made:
        use, results = _use(made, runs)
        calls, absent = _system_calls(made, runs)
    phases = _phases(settings, runs)
    modules = _python_calls(settings, runs)
    call, of_call = profile_call.measure(settings)
    wrong = sum(result.value != 2 for result in results)
    return Report(
        name="profile",
        title="Where a run's time goes",
        tables=(
            _processes(use, calls, runs), _table_of_phases(phases),
            _table_of_modules("Calls of Python functions on the host, a run", modules, runs),
            *profile_command.measure(settings), call,
            _table_of_modules("Calls of Python functions on the host, a tool call", of_call, 1),
        ),
        verdicts=(Criterion("every result is right", not wrong, f"{wrong} of {runs} wrong"),),
        notes=(
            f"{runs:,} runs of `{SUM.source}`, one after the other, until all cells are gone.",
            "The kernel counts no CPU time of inits: the nursery ignores SIGCHLD.",
            "Calls of Python are counted in other runs than time is: counting takes time.",
            *([f"System calls: absent, {absent}."] if absent else []),
        ),
    )  # fmt: skip


def _run(made: Sandbox, runs: int) -> list[SandboxResult]:
    results = [made.execute(SUM.source) for _ in range(runs)]
    made.settle()
    return results


# CPU time and page faults


def _use(made: Sandbox, runs: int) -> tuple[dict[str, Use], list[SandboxResult]]:
    before = _used(made)
    results = _run(made, runs)
    after = _used(made)
    return {
        role: Use(after[role].seconds - use.seconds, after[role].faults - use.faults)
        for role, use in before.items()
    }, results


def _used(made: Sandbox) -> dict[str, Use]:
    """Return what each kind of process has used; a launcher waits for its guests, and has their sum."""
    keeper, nursery, launcher = launcher_of(made)
    pids = {_SUPERVISOR: os.getpid(), KEEPER: keeper, NURSERY: nursery, LAUNCHER: launcher}
    stats = {role: stat for role, pid in pids.items() if (stat := stat_of(pid))}
    guests = stats[LAUNCHER]
    threads = [stat for stat in every_process().values() if stat.is_kernel_thread]
    return {role: Use(stat.seconds, stat.faults) for role, stat in stats.items()} | {
        GUEST: Use(guests.children_seconds, guests.children_faults),
        _KERNEL: Use(sum(stat.seconds for stat in threads), 0),
    }


# System calls


def _system_calls(made: Sandbox, runs: int) -> tuple[dict[str, int], str]:
    """Return how many each kind of process made, or why that cannot be counted."""
    if shutil.which("perf") is None:
        return {}, "perf is not installed"
    keeper, nursery, launcher = launcher_of(made)
    watched = {
        _SUPERVISOR: (os.getpid(), False), KEEPER: (keeper, False),
        NURSERY: (nursery, False), INIT: (nursery, True),
        LAUNCHER: (launcher, False), GUEST: (launcher, True),
    }  # fmt: skip
    with scratch_directory() as place, contextlib.ExitStack() as stack:
        for role, (pid, children) in watched.items():
            stack.enter_context(_counted(place / role, pid, children=children))
        _run(made, runs)
        stack.close()
        calls = {role: _count_in(place / role) for role in watched}
    if None in calls.values() or not calls[LAUNCHER]:
        return {}, f"perf cannot count {_COUNTED} here"
    counts = {role: count for role, count in calls.items() if count is not None}
    counts[INIT] -= counts[NURSERY]  # with their parents'
    counts[GUEST] -= counts[LAUNCHER]
    return counts, ""


@contextlib.contextmanager
def _counted(file: Path, pid: int, *, children: bool) -> Iterator[None]:
    """Count system calls of a process, and of `children` that it makes meanwhile."""
    inherited = [] if children else ["--no-inherit"]
    command = [
        "perf",
        "stat",
        "-x,",
        "-o",
        str(file),
        "-e",
        _COUNTED,
        *inherited,
        "-p",
        str(pid),
        "cat",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as process:
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdout.read(1)  # perf counts before it starts cat
        yield
        process.stdin.close()


def _count_in(file: Path) -> int | None:
    """Return what perf wrote, None if it could not count; a process that slept is "not counted"."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            number, _, name, *_ = [*line.split(","), "", ""]
            if name.startswith(_COUNTED) and number != "<not supported>":
                return int(number) if number.isdecimal() else 0
    return None


# Phases


def _phases(settings: Settings, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each phase of calls that found a cell ready."""
    found: dict[str, list[float]] = {phase: [] for phase in (*_PHASES, "all")}
    with sandbox(settings, _POOL) as made:
        for _ in range(runs):
            made.settle()
            result = made.execute(SUM.source)
            for phase in _PHASES:
                found[phase].append(getattr(result.phases, phase))
            found["all"].append(result.execution_time)
    return found


# Calls of Python


def _python_calls(settings: Settings, runs: int) -> Counter[str]:
    """Return calls of Python functions on the host, by file."""
    calls: Counter[str] = Counter()
    counting = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and counting.is_set():
            calls[frame.f_code.co_filename] += 1

    with _profiled(note), sandbox(settings, _POOL) as made:
        _run(made, 5)
        sys.setprofile(note)
        counting.set()
        _run(made, runs)
        counting.clear()
        sys.setprofile(None)
    calls.pop(__file__, None)
    return calls


@contextlib.contextmanager
def _profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Have every thread that starts meanwhile call `note`."""
    threading.setprofile(note)
    try:
        yield
    finally:
        threading.setprofile(None)


# Tables


def _processes(use: dict[str, Use], calls: dict[str, int], runs: int) -> ReportTable:
    total = sum(each.seconds for each in use.values()) or 1.0
    rows: list[tuple[Value, ...]] = []
    for role in _ROLES:
        used = use.get(role)
        made = calls[role] / runs if role in calls else None
        if used is None:
            rows.append((role, None, None, None, made))
        else:
            share = used.seconds / total * 100
            faults = used.faults / runs if role != _KERNEL else None
            rows.append((role, used.seconds / runs * MS, share, faults, made))
    return ReportTable(
        title="A run, by process",
        columns=(
            Column("process"), Column("CPU ms"), Column("share, %", 0), Column("page faults", 1),
            Column("system calls", 1),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _table_of_phases(phases: dict[str, list[float]]) -> ReportTable:
    return ReportTable(
        title="A call that found a cell ready, by phase",
        columns=(Column("phase"), *percentile_columns(3)),
        rows=tuple((phase, *percentile_row(seconds)) for phase, seconds in phases.items()),
    )


def _table_of_modules(title: str, modules: Counter[str], runs: int) -> ReportTable:
    named: Counter[str] = Counter()
    for file, count in modules.items():
        named[_name_of(file)] += count
    rows = [
        ("all", named.total() / runs),
        *((name, n / runs) for name, n in named.most_common(_ROWS)),
    ]
    return ReportTable(
        title=title,
        columns=(Column("module"), Column("calls", 1)),
        rows=tuple(rows),
        note=f"Of the {_ROWS} modules that make most." if len(named) > _ROWS else "",
    )


def _name_of(file: str) -> str:
    """Return a module as documents name it: ours below the package, others by their last two parts."""
    path = Path(file)
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(_PACKAGE))
    return "/".join(path.parts[-2:])

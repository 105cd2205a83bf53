"""Parallel callers of one sandbox, and of one in each of two processes: what limits them.

A supervisor is Python, and only one thread of a process runs Python at a time; a launcher and a
nursery have one thread each.  So the one of the three that needs most CPU time a call limits how many
processors one sandbox can keep busy: the CPU time of a whole call divided by it.  That ratio is the
same on a busy machine as on a quiet one.  A second process shows what is gained without that limit.
"""

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import IO

import msgspec

from ..harness.sandbox.checks import worker_count
from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import Policy
from ..runner.settings import PoolSettings
from .census import every_process, launcher_of, stat_of
from .measuring import median
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_CALLERS = (1, 2, 4, 8, 16)
_MOST_PROCESSES = 2
_SERVE = "from cellwright.benchmarks.parallel import serve; serve()"


class ServedSandbox(msgspec.Struct, frozen=True):
    """The sandbox of a process that takes turns."""

    policy: Policy
    workers: int = 1
    cells_per_cgroup: int = PoolSettings().cells_per_cgroup


class Turn(msgspec.Struct, frozen=True):
    """What the callers of one process are asked to do."""

    callers: int
    seconds: float


class Spent(msgspec.Struct, frozen=True):
    """The calls of one turn, and the seconds of wall time and of CPU time that they took."""

    calls: int
    wall: float
    supervisor: float
    launcher: float
    nursery: float
    cells: float  # guests and inits


class Together(msgspec.Struct, frozen=True):
    """A turn of all processes."""

    spent: tuple[Spent, ...]
    kernel: float  # CPU seconds of the kernel's threads, of the whole host

    @property
    def rate(self) -> float:
        return sum(each.calls / each.wall for each in self.spent)

    @property
    def processors(self) -> float:
        """How many processors one sandbox can keep busy; what the kernel's threads do comes on top."""
        *parts, _kernel = self.cpu_ms()
        return sum(parts) / max(parts[:3])

    def cpu_ms(self) -> tuple[float, float, float, float, float]:
        """Return supervisor, launcher, nursery, cells and kernel in milliseconds a call."""
        calls = sum(each.calls for each in self.spent) / 1000
        return (
            sum(each.supervisor for each in self.spent) / calls,
            sum(each.launcher for each in self.spent) / calls,
            sum(each.nursery for each in self.spent) / calls,
            sum(each.cells for each in self.spent) / calls,
            self.kernel / calls,
        )


def measure(settings: Settings) -> Report:
    """Return rates and CPU times by caller and process; one process and two take turns."""
    seconds = 0.2 if settings.smoke else 1.5
    turns: dict[tuple[int, int], list[Together]] = {}
    with ExitStack() as stack:
        served = ServedSandbox(settings.policy)
        workers = [stack.enter_context(ServingProcess(served)) for _ in range(_MOST_PROCESSES)]
        for _ in range(settings.amount(5, 1)):
            for callers in _CALLERS:
                for processes in range(1, min(callers, _MOST_PROCESSES) + 1):
                    turn = Turn(callers // processes, seconds)
                    found = together(workers[:processes], turn)
                    turns.setdefault((callers, processes), []).append(found)
    return _report(turns)


class ServingProcess:
    """A process with a sandbox; it takes turns that are written to it, one a line."""

    def __init__(self, served: ServedSandbox) -> None:
        self._served = served

    def __enter__(self) -> "ServingProcess":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.ask(self._served)
        self.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        self._process.wait()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout

    def ask(self, what: ServedSandbox | Turn) -> None:
        self._stdin.write(msgspec.json.encode(what) + b"\n")
        self._stdin.flush()

    def answer(self) -> bytes:
        """Wait for one line; raises RuntimeError if the process ends instead."""
        if line := self._stdout.readline():
            return line
        raise RuntimeError("a process with a sandbox ended; its message is on stderr")


def serve() -> None:
    """Make the sandbox of the first line, then take a turn for each line."""
    served = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServedSandbox)
    pool = PoolSettings(cells_per_cgroup=served.cells_per_cgroup)
    with sandbox(Settings(served.policy), pool, workers=served.workers) as made:
        _say(b"ready")
        for line in sys.stdin.buffer:
            _say(msgspec.json.encode(_take(made, msgspec.json.decode(line, type=Turn))))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _take(made: Sandbox, turn: Turn) -> Spent:
    before = _cpu(made)
    began = time.perf_counter()

    def caller(_: int) -> int:
        calls = 0
        while time.perf_counter() - began < turn.seconds:
            made.execute(SUM.source)
            calls += 1
        return calls

    with ThreadPoolExecutor(turn.callers) as threads:
        calls = sum(threads.map(caller, range(turn.callers)))
    wall = time.perf_counter() - began
    spent = (after - so_far for so_far, after in zip(before, _cpu(made), strict=True))
    return Spent(calls, wall, *spent)


def _cpu(made: Sandbox) -> tuple[float, float, float, float]:
    """Return the seconds so far of this process, launcher, nursery, and cells that ended; with workers
    of this process alone."""
    made.settle()
    own = resource.getrusage(resource.RUSAGE_SELF)
    if worker_count(made._given.workers) > 1:
        return own.ru_utime + own.ru_stime, 0.0, 0.0, 0.0
    _, *pids = launcher_of(made)
    nursery, launcher = (stat for pid in pids if (stat := stat_of(pid)))
    return (
        own.ru_utime + own.ru_stime,
        launcher.seconds,
        nursery.seconds,
        launcher.children_seconds + nursery.children_seconds,
    )


def together(workers: list[ServingProcess], turn: Turn) -> Together:
    """Have processes take a turn at the same time."""
    before = _of_the_kernel()
    for worker in workers:
        worker.ask(turn)
    spent = tuple(msgspec.json.decode(worker.answer(), type=Spent) for worker in workers)
    return Together(spent, _of_the_kernel() - before)


def _of_the_kernel() -> float:
    return sum(stat.seconds for stat in every_process().values() if stat.is_kernel_thread)


def _report(turns: dict[tuple[int, int], list[Together]]) -> Report:
    table = ReportTable(
        title="`1+1` in a fresh cell: calls a second, and CPU time a call by process",
        columns=(
            Column("callers", 0), Column("processes", 0), Column("calls/s", 0),
            Column("supervisor ms"), Column("launcher ms"), Column("nursery ms"), Column("cells ms"),
            Column("kernel threads ms"), Column("processors a sandbox keeps busy", 1),
        ),
        rows=tuple(_row(*key, found) for key, found in turns.items()),
        note=f"Medians over turns; {os.cpu_count()} processors.",
    )  # fmt: skip
    kept = median([each.processors for found in turns.values() for each in found])
    here = os.cpu_count() or 1
    return Report(
        name="parallel",
        title="Parallel callers, and what limits them",
        tables=(table,),
        verdicts=(
            Criterion(
                f"one sandbox keeps the {here} processors of this machine busy",
                kept >= here,
                f"up to {kept:.1f}",
            ),
        ),
        notes=(
            "Callers are threads, shared evenly among the processes; each process has a sandbox.",
            "Kernel threads: of the whole host, so a part may be other programs'.",
        ),
    )


def _row(callers: int, processes: int, found: list[Together]) -> tuple[Value, ...]:
    parts = zip(*(each.cpu_ms() for each in found), strict=True)
    return (
        callers,
        processes,
        median([each.rate for each in found]),
        *(median(part) for part in parts),
        median([each.processors for each in found]),
    )

"""Fresh cells a second with a growing number of clients, and the CPU time of one call."""

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..runner.launching.spawn import interpreter
from ..runner.settings import PoolSettings
from .census import cpu_seconds, launcher_of
from .commandlines import bubblewrap
from .interference import adopted_orphans, reap_orphans
from .measuring import median, quartile_columns, quartiles
from .programs import SUM
from .report import Column, Criterion, Curve, Curves, Report, ReportTable, Value
from .settings import Settings, sandbox

_CLIENTS = (1, 2, 4, 8)
POOLED, _DEMAND = "cellwright, pool of 8", "cellwright, no pool"
BUBBLEWRAP, BARE = "bwrap --unshare-all python3 -I -S", "python3 -I -S, no isolation"


class ThroughputContender(NamedTuple):
    name: str
    call: Callable[[], object]
    cpu: Callable[[], float]  # seconds so far of everything that it uses


class Round(NamedTuple):
    """What a moment of calling gave."""

    rate: float  # calls a second
    cpu_ms: float  # a call


Turns = dict[tuple[str, int], list[Round]]


def measure(settings: Settings) -> Report:
    """Return rates and CPU times for each number of clients; the contenders take turns."""
    rounds, seconds = (3, 0.2) if settings.smoke else (5, 1.5)
    with _contenders(settings) as contenders:
        turns: Turns = {
            (contender.name, clients): [] for contender in contenders for clients in _CLIENTS
        }
        for _ in range(settings.runs or rounds):
            for clients in _CLIENTS:
                for contender in contenders:
                    turns[contender.name, clients].append(turn(contender, clients, seconds))
            contenders.reverse()
    return _report(turns, smoke=settings.smoke)


@contextmanager
def _contenders(settings: Settings) -> Iterator[list[ThroughputContender]]:
    with ExitStack() as stack:
        stack.enter_context(adopted_orphans())
        pooled = stack.enter_context(sandbox(settings))
        demand = stack.enter_context(sandbox(settings, PoolSettings(size=0)))
        contenders = [of_sandbox(POOLED, pooled), of_sandbox(_DEMAND, demand)]
        if command := bubblewrap("-I", "-S", "-c", SUM.source):
            contenders.append(ThroughputContender(BUBBLEWRAP, of_command(command), cpu_of_children))
        bare = [interpreter(), "-I", "-S", "-c", SUM.source]
        contenders.append(ThroughputContender(BARE, of_command(bare), cpu_of_children))
        yield contenders


def of_sandbox(name: str, made: Sandbox) -> ThroughputContender:
    def cpu() -> float:
        made.settle()
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime + cpu_seconds(launcher_of(made))

    return ThroughputContender(name, partial(made.execute, SUM.source), cpu)


def of_command(command: list[str]) -> Callable[[], object]:
    return partial(
        subprocess.run,
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )


def cpu_of_children() -> float:
    """Return the CPU time of this process and of commands; bubblewrap does not wait for the process
    that it confines, so we do."""
    reap_orphans()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def turn(contender: ThroughputContender, clients: int, seconds: float) -> Round:
    contender.call()
    before = contender.cpu()
    began = time.perf_counter()

    def client(_: int) -> int:
        calls = 0
        while True:
            contender.call()
            calls += 1
            if time.perf_counter() - began > seconds:
                return calls

    with ThreadPoolExecutor(clients) as pool:
        calls = sum(pool.map(client, range(clients)))
    elapsed = time.perf_counter() - began
    return Round(calls / elapsed, (contender.cpu() - before) / calls * 1000)


def _report(turns: Turns, *, smoke: bool) -> Report:
    table = ReportTable(
        title="`1+1`, fresh cells a second",
        columns=(
            Column("contender"), Column("clients", 0), *quartile_columns("runs/s", 0),
            Column("CPU ms a run"),
        ),
        rows=tuple(_row(name, clients, found) for (name, clients), found in turns.items()),
        note=f"Quartiles over turns; {os.cpu_count()} processors.",
    )  # fmt: skip
    names = dict.fromkeys(name for name, _ in turns)
    curves = [
        Curve(name, tuple((float(n), median(_rates(turns[name, n]))) for n in _CLIENTS))
        for name in names
    ]
    return Report(
        name="throughput",
        title="Fresh cells a second",
        tables=(table,),
        brief=(_headline({of: turns[of] for of in turns if of[0] in (POOLED, BUBBLEWRAP)}),),
        headlines=(_headline(turns),),
        charts=(
            Curves(
                title="1+1, each in a fresh cell or process",
                x="clients",
                y="runs a second",
                lines=tuple(curves),
            ),
        ),
        verdicts=_verdicts(turns, smoke=smoke),
        notes=(
            "Every run of cellwright is a fresh cell, with its audit records.",
            "Clients are threads of one process.",
            "CPU time: of this process, the launcher, the guests; not what the kernel does later.",
        ),
    )


def _headline(turns: Turns) -> ReportTable:
    rows: list[tuple[Value, ...]] = [
        (name, *(median(_rates(turns[name, clients])) for clients in _CLIENTS))
        for name in dict.fromkeys(name for name, _ in turns)
    ]
    columns = (Column(f"{clients} client{'s' * (clients > 1)}", 0) for clients in _CLIENTS)
    return ReportTable(
        title=f"Runs a second on {os.cpu_count()} processors, each in a fresh cell or process",
        columns=(Column("contender"), *columns),
        rows=tuple(rows),
    )


def _rates(turns: list[Round]) -> list[float]:
    return [turn.rate for turn in turns]


def _row(name: str, clients: int, turns: list[Round]) -> tuple[Value, ...]:
    rates = quartiles(_rates(turns))
    return (name, clients, *rates, median([turn.cpu_ms for turn in turns]))


def _verdicts(turns: Turns, *, smoke: bool) -> tuple[Criterion, ...]:
    """Compare with bubblewrap; a smoke run compares CPU time only.

    On a busy machine the contender with more processes gets more of the processors, and a higher rate.
    """
    if (BUBBLEWRAP, 1) not in turns:
        return ()
    rates, cpu = (
        [
            best(median([getattr(each, what) for each in turns[name, n]]) for n in _CLIENTS)
            for name in (POOLED, BUBBLEWRAP)
        ]
        for what, best in (("rate", max), ("cpu_ms", min))
    )
    cheaper = Criterion(
        "a cell takes less CPU time than an interpreter in bubblewrap",
        cpu[0] < cpu[1],
        f"{cpu[0] / cpu[1]:.2f} times",
    )
    faster = Criterion(
        "more cells a second than bubblewrap starts interpreters",
        rates[0] > rates[1],
        f"{rates[0] / rates[1]:.1f} times",
    )
    return (cheaper,) if smoke else (cheaper, faster)

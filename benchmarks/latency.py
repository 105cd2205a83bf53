"""The latency of one call through the public API: with a ready cell, without one, in a session, in a
burst, with more callers than processors, and as a whole command."""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import cpu_count

from ..harness.sandbox.sandbox import Sandbox
from ..runner.settings import PoolSettings
from .measuring import (
    Contender,
    Times,
    distribution,
    percentile,
    percentile_columns,
    percentile_row,
    ratio,
    seconds_of,
    side_by_side,
)
from .programs import EVERY, SUM, SampleProgram
from .report import Column, Criterion, Curves, Report, ReportTable, Value
from .settings import Settings, sandbox

_QUIET = 0.1  # low percentile for verdicts, because a busy neighbour hits contenders at random
_WAYS_SECONDS, _BURST_SECONDS, _COLD_SECONDS = 25.0, 15.0, 20.0  # longest time of measuring
_ALIKE = 1.5
_READY, _DEMAND = "a cell stood ready", "made on demand, and gone after"
_SESSION = "a session's next request"
_BURST, _SATURATED = "burst of twice the pool", "saturated: four callers a processor"
_COLD = "cold: the whole command"


def measure(settings: Settings) -> Report:
    """Return percentiles of each way to call, for each program that cells can run here."""
    found: dict[str, Times] = {}
    absent: list[tuple[Value, ...]] = []
    with sandbox(settings) as pooled, sandbox(settings, pool=0) as on_demand:
        for program in EVERY:
            refusal = on_demand.execute(program.source).error
            if refusal:
                absent.append((program.name, f"absent: {refusal}", *[None] * 5))
                continue
            found[program.name] = _ways(settings, program, pooled, on_demand)
    found[SUM.name][_COLD] = _cold(settings)
    return _report(found, absent, smoke=settings.smoke)


def _ways(settings: Settings, program: SampleProgram, pooled: Sandbox, on_demand: Sandbox) -> Times:
    def ready() -> None:
        if not pooled.execute(program.source).pool_hit:
            raise RuntimeError("no cell stood ready")

    with pooled.session() as session:
        times = side_by_side(
            [
                Contender(_READY, ready, pooled.settle),
                Contender(_SESSION, partial(session.execute, program.source)),
                Contender(_DEMAND, partial(on_demand.execute, program.source)),
            ],
            settings.amount(2000, 30),
            seconds=_WAYS_SECONDS,
        )
    call = partial(pooled.execute, program.source)
    times[_BURST] = _burst(settings, call, pooled.settle)
    times[_SATURATED] = _saturated(settings.amount(2000, 40), call)
    return times


def _burst(
    settings: Settings, call: Callable[[], object], settle: Callable[[], None]
) -> list[float]:
    """Call in quick succession, twice as often as cells stand ready."""
    size = 2 * PoolSettings().size
    times: list[float] = []
    end = time.monotonic() + _BURST_SECONDS
    for _ in range(max(2, settings.amount(2000, 32) // size)):
        if times and time.monotonic() > end:
            break
        settle()
        times += [seconds_of(call) for _ in range(size)]
    return times


def _saturated(calls: int, call: Callable[[], object]) -> list[float]:
    callers = 4 * (cpu_count() or 1)
    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(lambda _: seconds_of(call), range(calls)))


def _cold(settings: Settings) -> list[float]:
    """Run the command from nothing, its cache of plans warm."""
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    command = [sys.executable, "-I", "-m", "cellwright", "run", *optional, "-c", "print(1)"]
    run = partial(
        subprocess.run, command, check=True, stdout=subprocess.DEVNULL, start_new_session=True
    )
    rounds = max(3, settings.amount(2000, 30) // 20)
    times = side_by_side([Contender(_COLD, run)], rounds, seconds=_COLD_SECONDS)
    return times[_COLD]


def _report(found: dict[str, Times], absent: list[tuple[Value, ...]], *, smoke: bool) -> Report:
    rows = [
        (program, way, *percentile_row(times))
        for program, ways in found.items()
        for way, times in ways.items()
    ]
    table = ReportTable(
        title="One call, milliseconds",
        columns=(Column("program"), Column("how"), *percentile_columns()),
        rows=(*rows, *absent),
    )
    charts = [_distributions(program, ways) for program, ways in found.items()]
    samples = {
        f"{program}: {way}": tuple(times)
        for program, ways in found.items()
        for way, times in ways.items()
    }
    return Report(
        name="latency",
        title="What one call costs",
        tables=(table,),
        headlines=(_headline(found[SUM.name]),),
        charts=tuple(charts),
        verdicts=_verdicts(found[SUM.name], 1.25 if smoke else 2.0),
        notes=(
            "From `Sandbox.execute`, default policy, every layer on, audit trail in a file.",
            "Made on demand: until nothing of the cell is left; the others: until all in it was killed",
        ),
        samples=samples,
    )


def _headline(ways: Times) -> ReportTable:
    """Return the ways to call, each with the ratio to a cell that stood ready."""
    ratios = {way: ratio(times, ways[_READY]) for way, times in ways.items()}
    rows = [
        (way, *percentile_row(times)[:3], ratios[way].value, ratios[way].spread * 100)
        for way, times in ways.items()
    ]
    columns = percentile_columns()[:3]
    return ReportTable(
        title="`1+1` through `Sandbox.execute`, every layer on, audited",
        columns=(Column("cellwright"), *columns, Column("ratio", 1), Column("±, %", 0)),
        rows=tuple(rows),
    )


def _distributions(program: str, ways: Times) -> Curves:
    return Curves(
        title=f"{program}: how many calls took how long",
        x="milliseconds",
        y="% of calls",
        lines=tuple(distribution(way, times) for way, times in ways.items()),
        logarithmic=True,
    )


def _verdicts(ways: Times, least: float) -> tuple[Criterion, ...]:
    """Say whether each way is so many times as quick as the next one."""
    ready, again, demand, cold = (
        percentile(ways[way], _QUIET) for way in (_READY, _SESSION, _DEMAND, _COLD)
    )
    return (
        Criterion(
            f"a session's next request takes less than {_ALIKE:g} times as long as a ready cell",
            again < _ALIKE * ready,
            f"{again / ready:.2f} times",
        ),
        Criterion(
            f"a cell that stood ready is at least {least:g} times as quick as one made on demand",
            demand >= least * ready,
            f"{demand / ready:.1f} times",
        ),
        Criterion(
            f"one made on demand is at least {least:g} times as quick as a whole command",
            cold >= least * demand,
            f"{cold / demand:.1f} times",
        ),
    )

"""Output as it comes: bytes a second out of a cell, beside a plain pipe between two processes."""

import os
import subprocess
import time

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import MIB
from ..runner.launching.spawn import interpreter
from .measuring import Contender, median, quartile_bar, quartile_columns, quartiles, side_by_side
from .report import Bars, Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_CHUNK = 64 * 1024  # the size of a pipe, and of one read
_WRITER = "import os\nchunk = b'x' * {chunk}\nfor _ in range({times}): os.write(1, chunk)"
_PIPE = "a pipe between two processes"
_KEPT, _CALLED, _ITERATED = "kept only", "on_output=", "start().output()"
_TARGET = 0.05  # relative to a pipe, where two processes only wake each other


def measure(settings: Settings) -> Report:
    """Return how quickly a program's output arrives, by each way to have it."""
    amount = (16 if settings.smoke else 128) * MIB
    code = _WRITER.format(chunk=_CHUNK, times=amount // _CHUNK)
    limits = replace(settings.policy.limits, output_total_bytes=2 * amount)
    policy = replace(settings.policy, limits=limits)
    with sandbox(settings._replace(policy=policy)) as made:
        times = side_by_side(_contenders(made, code), settings.amount(30, 3))
    return Report(
        name="stream",
        title="Output as it comes",
        tables=(_table(times, amount),),
        charts=(_chart(times, amount),),
        verdicts=(_verdict(times),),
        notes=(
            f"{amount // MIB} MiB in writes of 64 KiB; what is read is counted and dropped.",
            "The writer is the same program in the same interpreter; its start is in no row.",
            "Writer and reader wake each other for every 64 KiB: who else runs is in all rows.",
            f"{os.cpu_count()} processors.",
        ),
        samples={name: tuple(values) for name, values in times.items()},
    )


def _contenders(made: Sandbox, code: str) -> list[Contender]:
    def kept() -> float:
        return made.execute(code).phases.run

    def called() -> float:
        return made.execute(code, on_output=lambda stream, data: None).phases.run

    def iterated() -> float:
        run = made.start(code)
        for _ in run.output():
            pass
        return run.result().phases.run

    ways = {_KEPT: kept, _CALLED: called, _ITERATED: iterated}
    return [
        Contender(_PIPE, lambda: _through_a_pipe(code)),
        *(Contender(name, way, made.settle) for name, way in ways.items()),
    ]


def _through_a_pipe(code: str) -> float:
    """Return the seconds from the first byte to the end."""
    command = [interpreter(), "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.read(pipe, 1)
        began = time.perf_counter()
        while os.read(pipe, _CHUNK):
            pass
        return time.perf_counter() - began


def _rates(seconds: list[float], amount: int) -> list[float]:
    """Return MiB a second."""
    return [amount / MIB / each for each in seconds]


def _table(times: dict[str, list[float]], amount: int) -> ReportTable:
    pipe = median(_rates(times[_PIPE], amount))
    rows: list[tuple[Value, ...]] = []
    for name, seconds in times.items():
        rates = quartiles(_rates(seconds, amount))
        rows.append((name, *rates, rates[1] / pipe, len(seconds)))
    return ReportTable(
        title="A stream of output, MiB a second",
        columns=(
            Column("how"), *quartile_columns("MiB/s", 0), Column("of a pipe"), Column("runs", 0),
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _chart(times: dict[str, list[float]], amount: int) -> Bars:
    bars = tuple(quartile_bar(name, _rates(seconds, amount)) for name, seconds in times.items())
    return Bars(title="A stream of output", unit="MiB/s", bars=bars)


def _verdict(times: dict[str, list[float]]) -> Criterion:
    ratio = median(times[_PIPE]) / median(times[_CALLED])
    return Criterion(
        f"output through on_output is more than {_TARGET:.0%} of what a pipe brings",
        ratio > _TARGET,
        f"{ratio:.2f}",
    )

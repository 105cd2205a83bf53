"""The cost of sharing a pool: calls through the daemon beside those of a local sandbox."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..harness.sandbox.sandbox import Sandbox
from .measuring import (
    Contender,
    distribution,
    median,
    percentile_columns,
    percentile_row,
    side_by_side,
)
from .programs import SUM
from .report import Column, Criterion, Curves, Report, ReportTable
from .scratch import scratch_directory
from .settings import Settings, sandbox

_OWN, _SHARED = "own sandbox, a cell stood ready", "daemon, a cell stood ready"
_OWN_SESSION, _SHARED_SESSION = "own sandbox, a session", "daemon, a session"
_ANEW = "daemon, connected for one call"


def measure(settings: Settings) -> Report:
    """Return percentiles of the same calls, in this process's cells and in a daemon's."""
    with (
        daemon(settings) as path,
        sandbox(settings) as own,
        Sandbox(connect=path) as shared,
        own.session() as session,
        shared.session() as attached,
    ):
        times = side_by_side(
            [
                Contender(_OWN, partial(_ready, own), own.settle),
                Contender(_SHARED, partial(_ready, shared), shared.settle),
                Contender(_ANEW, partial(_anew, path), shared.settle),
                Contender(_OWN_SESSION, partial(session.execute, SUM.source)),
                Contender(_SHARED_SESSION, partial(attached.execute, SUM.source)),
            ],
            settings.amount(2000, 30),
        )
    return _report(times)


@contextlib.contextmanager
def daemon(settings: Settings) -> Iterator[Path]:
    """Give the socket of a daemon that serves the profile strict, audited to a file."""
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    with scratch_directory() as directory:
        path = Path(directory, "socket")
        command = [sys.executable, "-I", "-m", "cellwright", "serve", *optional]
        process = subprocess.Popen(
            [*command, "--socket", path, "--audit", Path(directory, "audit.jsonl")],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stderr
            if not process.stderr.readline().startswith(b"cellwright: serving"):
                raise RuntimeError("the daemon does not serve")
            yield path
        finally:
            process.terminate()
            process.communicate()


def _ready(made: Sandbox) -> None:
    if not made.execute(SUM.source).pool_hit:
        raise RuntimeError("no cell stood ready")


def _anew(path: Path) -> None:
    with Sandbox(connect=path) as made:
        made.execute(SUM.source)


def _report(times: dict[str, list[float]]) -> Report:
    ready = median(times[_OWN])
    columns = percentile_columns()
    rows = [
        (way, *percentile_row(seconds), median(seconds) / ready) for way, seconds in times.items()
    ]
    table = ReportTable(
        title="`1+1`, in cells of one's own and in a daemon's",
        columns=(Column("cellwright"), *columns, Column("ratio", 2)),
        rows=tuple(rows),
    )
    chart = Curves(
        title="One call: how many took how long",
        x="milliseconds",
        y="% of calls",
        lines=tuple(distribution(way, seconds) for way, seconds in times.items()),
        logarithmic=True,
    )
    return Report(
        name="daemon",
        title="What it costs to share a pool",
        tables=(table,),
        charts=(chart,),
        verdicts=(_verdict(times),),
        notes=("Default policy, every layer on, audit trail in a file; in turn, in one process.",),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )


def _verdict(times: dict[str, list[float]]) -> Criterion:
    ratio = median(times[_SHARED]) / median(times[_OWN])
    return Criterion(
        "a call through the daemon takes less than twice as long as one of one's own",
        ratio < 2,
        f"{ratio:.2f} times",
    )

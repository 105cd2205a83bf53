"""Growth of latency and memory with an old launcher, a long audit trail, and a busy host."""

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial
from os import cpu_count
from pathlib import Path
from typing import NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..runner.audit.log import AuditLog
from ..runner.audit.record import span_of
from ..runner.launching.spawn import interpreter
from ..runner.settings import PoolSettings
from .census import launcher_of, private_bytes
from .measuring import MS, Contender, median, percentile, seconds_of, side_by_side
from .programs import SUM
from .report import Column, Criterion, Curve, Curves, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings, sandbox

_MIB = 1024 * 1024
_CHECKS = 10  # how often on the way the age of a launcher is looked at
_RECORDS, _SMOKE_RECORDS = (0, 10_000, 100_000, 1_000_000), (0, 5_000)
_BURNING = "while True: pass"


class Age(NamedTuple):
    forks: int
    times: list[float]
    launcher_mib: float


def measure(settings: Settings) -> Report:
    """Return latency and memory against forks of one launcher, audit records, and busy processes."""
    ages = _ages(settings)
    trails = _trails(settings)
    loads = _loads(settings)
    return _report(ages, trails, loads)


def _ages(settings: Settings) -> list[Age]:
    """Fork from one launcher, and look at it every so often."""
    forks = settings.forks or (200 if settings.smoke else 5000)
    pool = PoolSettings(size=0, cells_per_launcher=2 * forks)
    share = max(1, forks // _CHECKS)
    with sandbox(settings, pool) as made:
        made.execute(SUM.source)
        call = partial(made.execute, SUM.source)
        return [
            Age(number, [seconds_of(call) for _ in range(share)], _launcher_mib(made))
            for number in range(share, forks + 1, share)
        ]


def _launcher_mib(made: Sandbox) -> float:
    return (private_bytes(launcher_of(made)[2]) or 0) / _MIB


def _trails(settings: Settings) -> dict[int, list[float]]:
    """Return times of a call whose trail is that long already; the trails take turns."""
    sizes = _SMOKE_RECORDS if settings.smoke else _RECORDS
    with contextlib.ExitStack() as stack:
        contenders = []
        for size in sizes:
            made = stack.enter_context(_with_trail(settings, size))
            contenders.append(Contender(str(size), partial(made.execute, SUM.source), made.settle))
        times = side_by_side(contenders, settings.amount(500, 20))
    return {int(name): values for name, values in times.items()}


@contextlib.contextmanager
def _with_trail(settings: Settings, records: int) -> Iterator[Sandbox]:
    with scratch_directory() as directory:
        never = 2**50  # no rotation: the length is the point
        with AuditLog(path=Path(directory, "audit.jsonl"), rotate_bytes=never) as log:
            span = span_of(None)
            for _ in range(records):
                log.record("execution", "start", sandbox_id="0" * 16, span=span)
            with Sandbox(policy=settings.policy, audit=log) as made:
                yield made


def _loads(settings: Settings) -> dict[int, list[float]]:
    """Return times of a call beside busy processes, which are ended again."""
    processors = cpu_count() or 1
    found: dict[int, list[float]] = {}
    with sandbox(settings) as made:
        call = Contender("", partial(made.execute, SUM.source), made.settle)
        for burning in (0, 1, processors, 2 * processors):
            with _burning(burning):
                found[burning] = side_by_side([call], settings.amount(300, 20))[""]
    return found


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    command = [interpreter(), "-I", "-S", "-c", _BURNING]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            burner = subprocess.Popen(command)
            stack.callback(burner.wait)
            stack.callback(burner.kill)  # called first
        yield


def _report(
    ages: list[Age], trails: dict[int, list[float]], loads: dict[int, list[float]]
) -> Report:
    forks = ReportTable(
        title="Age of a launcher, calls on demand",
        columns=(Column("forks", 0), *_PERCENTILES, Column("launcher MiB")),
        rows=tuple((age.forks, *_row(age.times), age.launcher_mib) for age in ages),
    )
    records = _table("Records in the audit trail, a cell stood ready", "records", trails)
    busy = _table("Other busy processes, a cell stood ready", "busy", loads)
    by_age = (Curve("p50", tuple((float(age.forks), median(age.times) * MS) for age in ages)),)
    by_load = tuple(
        Curve(name, tuple((float(n), percentile(times, share) * MS) for n, times in loads.items()))
        for name, share in (("p50", 0.5), ("p90", 0.9))
    )
    return Report(
        name="growth",
        title="What becomes slower",
        tables=(forks, records, busy),
        charts=(
            Curves(title="A call on demand", x="forks before it", y="milliseconds", lines=by_age),
            Curves(
                title="A call on a busy host", x="busy processes", y="milliseconds", lines=by_load
            ),
        ),
        verdicts=_verdicts(ages, trails),
    )


_PERCENTILES = (Column("p50 ms"), Column("p90 ms"), Column("p99 ms"))


def _row(times: list[float]) -> tuple[Value, ...]:
    return tuple(percentile(times, share) * MS for share in (0.5, 0.9, 0.99))


def _table(title: str, of: str, found: dict[int, list[float]]) -> ReportTable:
    rows = tuple((number, *_row(times)) for number, times in found.items())
    return ReportTable(title=title, columns=(Column(of, 0), *_PERCENTILES), rows=rows)


def _verdicts(ages: list[Age], trails: dict[int, list[float]]) -> tuple[Criterion, ...]:
    grown = ages[-1].launcher_mib - ages[0].launcher_mib
    shortest, longest = median(trails[min(trails)]), median(trails[max(trails)])
    return (
        Criterion(
            "an old launcher is as light as a young one, within 5 MiB",
            grown <= 5,
            f"{grown:+.2f} MiB after {ages[-1].forks:,} forks",
        ),
        Criterion(
            "a long trail does not make calls slower, within a half",
            longest <= 1.5 * shortest,
            f"{longest / shortest:.2f} times with {max(trails):,} records",
        ),
    )

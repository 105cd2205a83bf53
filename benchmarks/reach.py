"""The goals of speed beside what is measured, in one table.

Each row is a ratio to something that ran in the same rounds, or a count.  Rounds repeat until the row
is steady, or its time is over.
"""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import MIB
from ..policies.policy import Python as Packages
from ..runner.audit.log import AuditLog
from ..runner.launching.spawn import interpreter
from ..runner.settings import PoolSettings
from .census import ProcessStat, guests_of, launcher_of, private_bytes, stat_of
from .commandlines import bubblewrap
from .interference import adopted_orphans
from .measuring import STEADY, Contender, Estimate, Times, estimate, ratio, side_by_side
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable, Value
from .round_trips import echo, seconds_of_call, seconds_of_round_trip
from .settings import Settings, sandbox
from .throughput import (
    BARE,
    BUBBLEWRAP,
    POOLED,
    Round,
    ThroughputContender,
    cpu_of_children,
    of_command,
    of_sandbox,
    turn,
)
from .tools import increment

_READY = "ready cell: `bwrap --unshare-all python3 -I -S` takes ... times as long, p50"
_RATE = "fresh cells a second with two processors, of those of bubblewrap"
_CPU = "CPU time of a run, of that of `python3 -I -S`"
_GUEST_FAULTS, _LAUNCHER_FAULTS = "page faults of a cell: guest", "page faults of a cell: launcher"
_PRIVATE = "private memory of a cell that stands ready, MiB"
_TOOL = "tool call from a cell, of a round trip between two Pythons through a socketpair"
_COLD = "`cellwright run -c 'print(1)'`, of `bwrap --unshare-all python3 -I`"
_PACKAGES = "first call with pandas preloaded, of one that imports it in the cell"

_ROW_SECONDS = 20.0
_CLIENTS = 4
_TURN_SECONDS = 1.5
_CELLS = 50  # between two looks at page faults
_NO_BUBBLEWRAP = "bwrap is not installed"
# For a launcher that is replaced meanwhile would be a second one, with page faults of its own.
_POOL = PoolSettings(cells_per_launcher=10**6)
_FRAME = "import pandas\nint(pandas.DataFrame({'a': [1, 2]})['a'].sum())"


class Goal(NamedTuple):
    reach: float
    is_lowest: bool = False  # less than this is missed; else more is

    def verdict_on(self, value: float) -> str:
        missed = (self.reach - value if self.is_lowest else value - self.reach) / self.reach
        return "reached" if missed <= 0 else f"missed by {missed:.0%}"


GOALS = {
    _READY: Goal(35, is_lowest=True),
    _RATE: Goal(3.5, is_lowest=True),
    _CPU: Goal(0.35),
    _GUEST_FAULTS: Goal(250),
    _LAUNCHER_FAULTS: Goal(10),
    _PRIVATE: Goal(1.3),
    _TOOL: Goal(3),
    _COLD: Goal(2),
    _PACKAGES: Goal(0.02),
}
Found = dict[str, Estimate | str]  # by row: what was measured, or why nothing was


def measure(settings: Settings) -> Report:
    """Return the table of goals."""
    found: Found = {}
    with adopted_orphans():
        for part in (_ready, _throughput, _cell, _tool, _cold, _packages):
            found |= part(settings)
    return report(found)


def report(found: Found) -> Report:
    table = ReportTable(
        title="Goals of speed",
        columns=(
            Column("what"), Column("measured"), Column("±, %", 0), Column("rounds", 0),
            Column("steady"), Column("reach", 2), Column("verdict"),
        ),
        rows=tuple(_row(what, goal, found[what]) for what, goal in GOALS.items()),
        note=f"±: half of the 95 % interval. Steady: it is below {STEADY:.0%}, which ends the rounds.",
    )  # fmt: skip
    return Report(
        name="reach",
        title="How far it is to the goals",
        tables=(table,),
        headlines=(table,),
        verdicts=_verdicts(found),
        notes=(
            "Default policy, every layer on, audit trail in memory, `1+1` where no program is named.",
            f"Cells a second: {_CLIENTS} clients each.",
            "CPU time: of this process, of the launcher and of the cells.",
        ),
    )


def _row(what: str, goal: Goal, seen: Estimate | str) -> tuple[Value, ...]:
    if isinstance(seen, str):
        return (what, None, None, None, None, goal.reach, f"absent: {seen}")
    steady = "yes" if seen.is_steady else "no"
    verdict = goal.verdict_on(seen.value)
    return (what, seen.value, seen.spread * 100, seen.rounds, steady, goal.reach, verdict)


def _verdicts(found: Found) -> tuple[Criterion, ...]:
    faults, quick = found[_LAUNCHER_FAULTS], found[_READY]
    verdicts = []
    if isinstance(faults, Estimate):
        few = faults.value <= 5 * GOALS[_LAUNCHER_FAULTS].reach
        verdicts.append(
            Criterion(
                "a launcher has few page faults of its own a cell", few, f"{faults.value:.0f}"
            )
        )
    if isinstance(quick, Estimate):
        seen = f"{quick.value:.1f} times"
        verdicts.append(
            Criterion(
                "a ready cell is at least twice as quick as bubblewrap", quick.value >= 2, seen
            )
        )
    return tuple(verdicts)


# The rows


def _compared(
    settings: Settings,
    above: Contender,
    below: Contender,
    usual: int,
    seconds: float = _ROW_SECONDS,
) -> Estimate:
    """Return the ratio of the times of two contenders."""

    def compare(times: Times) -> Estimate:
        return ratio(times[above.name], times[below.name])

    return compare(
        side_by_side(
            [above, below], settings.amount(usual, 10), seconds=seconds,
            is_enough=lambda times: compare(times).is_steady,
        )
    )  # fmt: skip


def _ready(settings: Settings) -> Found:
    command = bubblewrap("-I", "-S", "-c", SUM.source)
    if command is None:
        return {_READY: _NO_BUBBLEWRAP}
    with audited(settings) as made:
        call = Contender("ready", partial(_call_of_ready, made, SUM.source), made.settle)
        theirs = Contender("bubblewrap", of_command(command))
        return {_READY: _compared(settings, theirs, call, 1000)}


def _call_of_ready(made: Sandbox, source: str) -> None:
    result = made.execute(source)
    if not result.ok or not result.pool_hit:
        raise RuntimeError(result.error or "no cell stood ready")


def _throughput(settings: Settings) -> Found:
    """Let the contenders take turns of calling, on two processors."""
    if len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys((_RATE, _CPU), "there is one processor only")
    command = bubblewrap("-I", "-S", "-c", SUM.source)
    bare = [interpreter(), "-I", "-S", "-c", SUM.source]
    with _two_processors(), audited(settings) as made:
        contenders = [
            of_sandbox(POOLED, made),
            ThroughputContender(BARE, of_command(bare), cpu_of_children),
        ]
        if command:
            contenders.append(ThroughputContender(BUBBLEWRAP, of_command(command), cpu_of_children))
        return _compared_turns(settings, contenders)


@contextlib.contextmanager
def _two_processors() -> Iterator[None]:
    """Keep to two processors what this thread starts meanwhile."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _compared_turns(settings: Settings, contenders: list[ThroughputContender]) -> Found:
    turns: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    seconds = 0.3 if settings.smoke else _TURN_SECONDS
    end = time.monotonic() + 2 * _ROW_SECONDS
    found: Found = {}
    for number in range(settings.amount(10, 1)):
        for contender in contenders:
            turns[contender.name].append(turn(contender, _CLIENTS, seconds))
        contenders.reverse()
        found = _of_turns(turns)
        steady = all(isinstance(each, str) or each.is_steady for each in found.values())
        if time.monotonic() > end or (number >= 3 and steady):
            break
    return found


def _of_turns(turns: dict[str, list[Round]]) -> Found:
    rates = {name: [each.rate for each in rounds] for name, rounds in turns.items()}
    cpu = {name: [each.cpu_ms for each in rounds] for name, rounds in turns.items()}
    has_bubblewrap = BUBBLEWRAP in turns
    return {
        _RATE: ratio(rates[POOLED], rates[BUBBLEWRAP]) if has_bubblewrap else _NO_BUBBLEWRAP,
        _CPU: ratio(cpu[POOLED], cpu[BARE]),
    }


def _cell(settings: Settings) -> Found:
    """Return what the kernel counts of cells: a launcher waits for its guests, and has their sum."""
    guest, launcher = [], []
    with audited(settings) as made:
        for _ in range(settings.amount(10, 2)):
            before = _launcher_stat(made)
            for _ in range(_CELLS):
                made.execute(SUM.source)
            after = _launcher_stat(made)
            guest.append((after.children_faults - before.children_faults) / _CELLS)
            launcher.append((after.faults - before.faults) / _CELLS)
        private = [(private_bytes(pid) or 0) / MIB for pid in guests_of(made)]
    return {
        _GUEST_FAULTS: estimate(guest),
        _LAUNCHER_FAULTS: estimate(launcher),
        _PRIVATE: estimate(private),
    }


def _launcher_stat(made: Sandbox) -> ProcessStat:
    made.settle()
    stat = stat_of(launcher_of(made).launcher)
    if stat is None:
        raise RuntimeError("the launcher is gone")
    return stat


def _tool(settings: Settings) -> Found:
    count = 20 if settings.smoke else 200
    with audited(settings, tools=[increment]) as made, echo() as end:
        ours = Contender("tool", partial(seconds_of_call, made, "increment", count), made.settle)
        theirs = Contender("socketpair", partial(seconds_of_round_trip, end, count))
        return {_TOOL: _compared(settings, ours, theirs, 200)}


def _cold(settings: Settings) -> Found:
    command = bubblewrap("-I", "-c", "print(1)")
    if command is None:
        return {_COLD: _NO_BUBBLEWRAP}
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    ours = [sys.executable, "-I", "-m", "cellwright", "run", *optional, "-c", "print(1)"]
    contenders = (Contender("ours", of_command(ours)), Contender("theirs", of_command(command)))
    return {_COLD: _compared(settings, *contenders, 200)}


def _packages(settings: Settings) -> Found:
    spec = importlib.util.find_spec("pandas")
    if spec is None or spec.origin is None:
        return {_PACKAGES: "pandas is not installed"}
    site = os.path.dirname(os.path.dirname(spec.origin))
    with (
        audited(_with_packages(settings, Packages(path=(site,), preload=("pandas",)))) as ready,
        audited(_with_packages(settings, Packages(path=(site,)))) as importing,
    ):
        refusal = importing.execute(_FRAME).error or ready.execute(_FRAME).error
        if refusal:
            return {_PACKAGES: refusal.strip().splitlines()[-1]}
        ours, theirs = (
            Contender(name, partial(_call_of_ready, made, _FRAME), made.settle)
            for name, made in (("ready", ready), ("importing", importing))
        )
        return {_PACKAGES: _compared(settings, ours, theirs, 40)}


def _with_packages(settings: Settings, packages: Packages) -> Settings:
    return settings._replace(policy=replace(settings.policy, python=packages))


def audited(
    settings: Settings,
    *,
    tools: Sequence[Callable[..., object]] = (),
) -> contextlib.AbstractContextManager[Sandbox]:
    """Return a sandbox with cells that stand ready, and its audit trail in memory."""
    return sandbox(settings, _POOL, audit=AuditLog(max_entries=1000), tools=tools)

"""Branches of sessions by memory and paused sessions, beside a replay of calls, a fresh session, and a
process that CRIU dumps and restores."""

import contextlib
from collections.abc import Callable
from functools import partial

from ..harness.examples.tree_search import TreeSearch, search
from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sessions.session import Session
from ..runner.settings import PauseSettings, SessionSettings
from .criu import CriuAbsent, DumpedProcess
from .measuring import (
    PERCENTILES,
    Contender,
    distribution,
    median,
    percentile_columns,
    percentile_row,
    seconds_of,
    side_by_side,
)
from .puzzle import expected
from .report import Column, Criterion, Curves, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings, sandbox
from .twins import Twins, twins

_FRESH, _SMALL, _EIGHT = "a fresh session", "branch, small session", "branch, eight at once, each"
_LARGE, _REPLAY = "branch, 8,000 more pages", "fork by replay of ten calls"
_PAUSE, _RESUME = "pause, small session", "resume, small session"
_DUMP, _RESTORE = "CRIU dump, a process in no cell", "CRIU restore, a process in no cell"
_CRIU_EVERY = 5  # rounds: both take long
_AT_ONCE = 8
_NODES, _SMOKE_NODES = 1000, 20
_PAGES = 8_000
_CALL = "class Point:\n    x = 1\npoints = [Point() for _ in range(1000)]"
_PROGRAMS, _SMOKE_PROGRAMS = 500, 3


def measure(settings: Settings) -> Report:
    """Return percentiles of the time until new sessions can be called."""
    with (
        contextlib.ExitStack() as stack,
        scratch_directory() as directory,
        sandbox(settings, pauses=PauseSettings(directory)) as made,
        made.session() as small,
        made.session() as large,
    ):
        criu, no_criu = _criu(stack)
        paused = _Paused(made)
        for _ in range(10):
            small.execute(_CALL)
        large.execute(f"{_CALL}\npages = bytearray(b'x') * {_PAGES * 4096}")
        times = side_by_side(
            [
                Contender(_FRESH, partial(_opened, lambda: (made.session(),)), made.settle),
                Contender(_SMALL, partial(_opened, small.branch), made.settle),
                Contender(_EIGHT, partial(_eight, small), made.settle),
                Contender(_LARGE, partial(_opened, large.branch), made.settle),
                Contender(_PAUSE, paused.pause, made.settle),
                Contender(_RESUME, paused.resume, made.settle),
                Contender(_REPLAY, partial(_opened, lambda: (small.fork(),)), made.settle),
                *criu,
            ],
            settings.amount(300, 5),
        )
        paused.session.close()
    nodes = settings.amount(_NODES, _SMOKE_NODES)
    with sandbox(settings, sessions=SessionSettings(alive=64)) as made, made.session() as root:
        found = search(root, nodes)
    right = found.nodes == nodes == found.by_memory and tuple(found.solutions) == expected(nodes)
    agreed = twins(settings, settings.amount(_PROGRAMS, _SMOKE_PROGRAMS))
    return _report(times, agreed, found, no_criu, is_right=right)


def _criu(stack: contextlib.ExitStack) -> tuple[tuple[Contender, ...], str]:
    """Return what CRIU does, or else why it does nothing here."""
    try:
        process = stack.enter_context(DumpedProcess(stack.enter_context(scratch_directory())))
    except CriuAbsent as absent:
        return (), str(absent)
    turns = _Turns(process)
    return (
        Contender(_DUMP, turns.dump, every=_CRIU_EVERY),
        Contender(_RESTORE, turns.restore, every=_CRIU_EVERY),
    ), ""


class _Turns:
    """A process that is dumped before it is restored, and restored before it is dumped, whichever is
    measured first."""

    def __init__(self, process: DumpedProcess) -> None:
        self._process = process

    def dump(self) -> float:
        seconds = self._process.dump()
        self._process.restore()
        return seconds

    def restore(self) -> float:
        self._process.dump()
        return self._process.restore()


class _Paused:
    """A small session that is paused and resumed, again and again."""

    def __init__(self, made: Sandbox) -> None:
        self._made = made
        self.session = made.session()
        for _ in range(10):
            self.session.execute(_CALL)

    def pause(self) -> float:
        """Return how long a pause took."""
        tokens: list[str] = []
        seconds = seconds_of(lambda: tokens.append(self.session.pause()))
        self.session = self._made.resume(tokens[0])
        return seconds

    def resume(self) -> float:
        """Return how long it took to resume a session."""
        token = self.session.pause()
        made: list[Session] = []
        seconds = seconds_of(lambda: made.append(self._made.resume(token)))
        self.session = made[0]
        return seconds


def _opened(make: Callable[[], tuple[Session, ...]]) -> float:
    """Return how long it took until the sessions were there; they are closed afterwards."""
    made: list[Session] = []
    with contextlib.ExitStack() as closing:
        seconds = seconds_of(lambda: made.extend(make()))
        for each in made:
            closing.callback(each.close)
            if each.not_copied:
                raise RuntimeError(f"no branch by memory: {each.not_copied}")
    return seconds


def _eight(session: Session) -> float:
    return _opened(partial(session.branch, _AT_ONCE)) / _AT_ONCE


def _report(
    times: dict[str, list[float]], found: Twins, tree: TreeSearch, no_criu: str, *, is_right: bool
) -> Report:
    fresh = median(times[_FRESH])
    rows: list[tuple[Value, ...]] = [
        (way, *percentile_row(seconds), median(seconds) / fresh) for way, seconds in times.items()
    ]
    if no_criu:
        rows += [(way, *(None,) * len(PERCENTILES), 0, None) for way in (_DUMP, _RESTORE)]
    page = (median(times[_LARGE]) - median(times[_SMALL])) / _PAGES * 1e6
    table = ReportTable(
        title="Another session of the same state",
        columns=(Column("until it can be called"), *percentile_columns(), Column("ratio", 2)),
        rows=tuple(rows),
    )
    chart = Curves(
        title="Another session: how many took how long",
        x="milliseconds",
        y="% of sessions",
        lines=tuple(distribution(way, seconds) for way, seconds in times.items()),
        logarithmic=True,
    )
    return Report(
        name="branch",
        title="What it costs to branch a session",
        tables=(table,),
        charts=(chart,),
        verdicts=(
            Criterion(
                "random programs go on in branches as an unbranched twin does",
                found.agreed == found.programs,
                f"{found.agreed} of {found.programs}",
            ),
            Criterion(
                "their branches are made by memory",
                found.by_memory == found.branches,
                f"{found.by_memory} of {found.branches}",
            ),
            Criterion(
                "a search of a tree, each node a branch, finds what one without cells finds",
                is_right,
                f"{tree.nodes} nodes",
            ),
        ),
        notes=(
            f"{page:.2f} µs for each page beyond those of the small session.",
            (
                f"Eight queens by branches: {tree.nodes} nodes, {len(tree.solutions)} solutions, "
                f"{tree.nodes / tree.seconds:.0f} nodes a second."
            ),
            *((f"No numbers of CRIU: {no_criu}.",) if no_criu else ()),
        ),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )

"""The same programs elsewhere, side by side and in turn: other sandboxes, other Pythons, no sandbox."""

from contextlib import ExitStack
from functools import partial
from math import isnan, nan
from typing import NamedTuple

import msgspec

from .lineup import BUBBLEWRAP, ON_DEMAND, READY, every_peer
from .measuring import (
    MS,
    STEADY,
    Contender,
    Times,
    median,
    quartile_bar,
    quartile_columns,
    quartiles,
    ratio,
    side_by_side,
)
from .peer_base import AbsentError, Isolation, Peer
from .programs import SUM, TEXT, SampleProgram
from .report import Bars, Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings

_SLOW_SECONDS, _SELDOM = 0.2, 10  # slower peers take part in every tenth round
_SECONDS = 50.0  # longest time of measuring a program
_PROGRAMS = (SUM, TEXT)
_BRIEF = (READY, ON_DEMAND, "python3 -I", BUBBLEWRAP, "runc", "podman")


class PeerTimes(NamedTuple):
    peer: Peer
    version: str
    times: dict[str, list[float]]  # program -> seconds
    refusals: dict[str, str]  # program -> why it has none
    failures: list[str]  # failures of single runs, after the peer was seen to work


def measure(settings: Settings) -> Report:
    """Return the times of every peer that is here, and why the others are not."""
    with ExitStack() as stack:
        place = stack.enter_context(scratch_directory())
        found: list[PeerTimes] = []
        absent: dict[str, str] = {}
        for peer in every_peer(settings):
            stack.callback(peer.close)
            try:
                found.append(PeerTimes(peer, peer.find(place), {}, {}, []))
            except AbsentError as why:
                absent[peer.name] = str(why)
        for program in _PROGRAMS:
            _measure(settings, program, found)
    return _report(found, absent)


def _measure(settings: Settings, program: SampleProgram, found: list[PeerTimes]) -> None:
    contenders = []
    for each in found:
        try:
            first = min(each.peer.run(program), each.peer.run(program))
        except AbsentError as why:
            each.refusals[program.name] = str(why)
            continue
        seldom = _SELDOM if first > _SLOW_SECONDS else 1
        contenders.append(Contender(each.peer.name, partial(_clocked, each, program), every=seldom))
    times = side_by_side(
        contenders,
        settings.amount(300, 10),
        seconds=_SECONDS,
        is_enough=partial(_is_steady, contenders),
    )
    for each in found:
        if good := _good(times.get(each.peer.name, [])):
            each.times[program.name] = good


def _is_steady(contenders: list[Contender], times: Times) -> bool:
    """Tell whether every ratio is known well enough; those that take part seldom are not waited for."""
    often = [_good(times[each.name]) for each in contenders if each.every == 1]
    ready = _good(times[READY])
    return all(each and ratio(each, ready).is_steady for each in often)


def _good(times: list[float]) -> list[float]:
    return [seconds for seconds in times if not isnan(seconds)]


def _clocked(each: PeerTimes, program: SampleProgram) -> float:
    """Return the seconds of a run, or that there are none: a single failure is counted."""
    try:
        return each.peer.run(program)
    except AbsentError as why:
        each.failures.append(str(why))
        return nan


# What is said of it


def _report(found: list[PeerTimes], absent: dict[str, str]) -> Report:
    here = [each for each in found if each.times]
    absent = absent | {
        each.peer.name: "; ".join(dict.fromkeys(each.refusals.values()))
        for each in found
        if not each.times
    }
    missing = ReportTable(
        title="Not here",
        columns=(Column("peer"), Column("why")),
        rows=tuple(absent.items()),
    )
    times = tuple(_times(program, here) for program in _PROGRAMS)
    return Report(
        name="peers",
        title="The same programs elsewhere",
        tables=(*times, _isolation(here), *([missing] if absent else [])),
        brief=(_brief(times[0]),),
        headlines=(msgspec.structs.replace(times[0], title="The same program elsewhere, `1+1`"),),
        charts=tuple(_bars(program, here) for program in _PROGRAMS),
        verdicts=_verdicts(here),
        notes=(
            "All print the same text, which is checked in every run.",
            "Libraries time their own calls in a worker that stays; commands are whole processes.",
            f"±: half of a ratio's 95 % interval. Rounds end once all are below {STEADY:.0%}.",
            f"Rounds end after {_SECONDS:g} s at the latest.",
            "Compare within a kind of isolation: the table below the times says what each has.",
        ),
        samples={
            f"{each.peer.name}: {program}": tuple(seconds)
            for each in here
            for program, seconds in each.times.items()
        },
    )


def _times(program: SampleProgram, here: list[PeerTimes]) -> ReportTable:
    ours = next(each for each in here if each.peer.name == READY)
    refusals = [
        f"{each.peer.name}: {each.refusals[program.name]}."
        for each in here
        if program.name in each.refusals
    ]
    failures = [
        f"{each.peer.name}: {len(each.failures)} runs failed, the first so: {each.failures[0]}."
        for each in here
        if each.failures
    ]
    return ReportTable(
        title=f"`{program.name}`",
        columns=(
            Column("peer"), Column("version"), *quartile_columns("ms"),
            Column("ratio", 1), Column("±, %", 0), Column("runs", 0), Column("new for each call"),
            Column("Python"),
        ),
        rows=tuple(_row(program, each, ours) for each in here),
        note=" ".join([*refusals, *failures]),
    )  # fmt: skip


def _brief(times: ReportTable) -> ReportTable:
    """Return the rows of the best known peers: medians, ratios, what is new for each call."""
    wanted = ("peer", "p50 ms", "ratio", "new for each call")
    places = [[each.title for each in times.columns].index(name) for name in wanted]
    return ReportTable(
        title="`1+1`, one call",
        columns=tuple(times.columns[place] for place in places),
        rows=tuple(tuple(row[place] for place in places) for row in times.rows if row[0] in _BRIEF),
    )


def _row(program: SampleProgram, each: PeerTimes, ours: PeerTimes) -> tuple[Value, ...]:
    head = (each.peer.name, each.version)
    words = (each.peer.isolation.fresh, each.peer.isolation.python)
    times = each.times.get(program.name)
    if times is None:
        return (*head, *[None] * 6, *words)
    seen = ratio(times, ours.times[program.name])
    return (*head, *quartiles(times, MS), seen.value, seen.spread * 100, len(times), *words)


def _isolation(here: list[PeerTimes]) -> ReportTable:
    return ReportTable(
        title="What stands between the program and the machine",
        columns=(Column("peer"), *(Column(name) for name in Isolation._fields)),
        rows=tuple((each.peer.name, *each.peer.isolation) for each in here),
        note="As each is run here.  `filter`: of system calls, by what it lists.",
    )


def _bars(program: SampleProgram, here: list[PeerTimes]) -> Bars:
    bars = [
        quartile_bar(each.peer.name, each.times[program.name], MS)
        for each in here
        if program.name in each.times
    ]
    return Bars(
        title=f"{program.name}: one call",
        unit="milliseconds, medians with quartiles",
        bars=tuple(bars),
        logarithmic=True,
    )


def _verdicts(here: list[PeerTimes]) -> tuple[Criterion, ...]:
    medians = {
        each.peer.name: median(each.times[SUM.name]) for each in here if SUM.name in each.times
    }
    if BUBBLEWRAP not in medians:
        return ()
    quicker = medians[BUBBLEWRAP] / medians[READY]
    return (
        Criterion(
            "a cell that stood ready is at least twice as quick as bubblewrap",
            quicker >= 2,
            f"{quicker:.1f} times",
        ),
    )

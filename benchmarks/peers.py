"""The same programs elsewhere: other sandboxes, other Pythons, none at all; side by side, in turns."""

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..harness.sandbox import Sandbox
from ..runner.pool import PoolSettings
from . import commandlines, libraries
from .contestants import AbsentError, Command, Isolation, Peer, check_output, version_of
from .libraries import Library
from .measuring import Contender, median, quartile_bar, quartile_columns, quartiles, side_by_side
from .programs import SUM, TEXT, Program
from .report import Bars, Column, Report, Table, Value, Verdict
from .settings import Settings, sandbox

_MS = 1000.0
_SLOW_SECONDS, _SELDOM = 0.2, 10  # who takes longer takes part in every tenth round
_PROGRAMS = (SUM, TEXT)
_READY, _DEMAND = "cellwright, a cell stood ready", "cellwright, made on demand"
_BUBBLEWRAP = "bwrap --unshare-all python3 -I -S"
_HOST, _CPYTHON = "the host's", "CPython"
_NONE = Isolation("process", "none", "none", "all", "all", "none", _HOST, _CPYTHON)
_CELL = Isolation(
    "process, all namespaces", "pid, mount, net, ipc, uts, user, cgroup", "what is allowed",
    "interpreter's; Landlock too", "none", "memory, CPU, processes, time, output", _HOST, _CPYTHON,
)  # fmt: skip
_CONTAINER = Isolation(
    "process, its namespaces", "pid, mount, net, ipc, uts", "none", "/usr, interpreter's", "none",
    "memory, processes", _HOST, _CPYTHON,
)  # fmt: skip
_IN_PROCESS = Isolation(
    "globals", "none", "none", "by checks in Python", "by checks in Python", "none", _HOST,
    "CPython, a subset",
)  # fmt: skip


class Ours:
    """Our own cells, as a peer."""

    def __init__(self, name: str, settings: Settings, pool: int) -> None:
        self.name = name
        self.isolation = _CELL
        self._stack = ExitStack()
        self._sandbox: Sandbox | None = None
        self._settings = settings
        self._pool = pool

    def find(self, place: Path) -> str:
        self._sandbox = self._stack.enter_context(sandbox(self._settings, self._pool))
        from importlib.metadata import version

        return version("cellwright")

    def run(self, program: Program) -> float:
        assert self._sandbox is not None
        self._sandbox.settle()
        began = time.perf_counter()
        result = self._sandbox.execute(program.printing)
        seconds = time.perf_counter() - began
        check_output(program, result.stdout)
        if result.pool_hit != (self._pool > 0):
            raise RuntimeError("no cell stood ready")
        return seconds

    def close(self) -> None:
        self._stack.close()


def every_peer(settings: Settings) -> list[Peer]:
    """Return all that we know of, found or not."""
    return [
        Ours(_READY, settings, PoolSettings().size),
        Ours(_DEMAND, settings, 0),
        *_interpreters(),
        *_containers(),
        *_elsewhere(settings.peers),
    ]


def _interpreters() -> list[Peer]:
    version = partial(str, ".".join(map(str, sys.version_info[:3])))
    return [
        Command(f"python3 {' '.join(flags)}", _NONE, partial(_bare, flags), version)
        for flags in (("-I", "-S"), ("-I",))
    ]


def _bare(flags: tuple[str, ...], place: Path, program: Program) -> list[str]:
    return commandlines.bare(*flags, "-c", program.printing)


def _bubblewrap(place: Path, program: Program) -> list[str]:
    line = commandlines.bubblewrap("-I", "-S", "-c", program.printing)
    if line is None:
        raise AbsentError("bwrap is not installed")
    return line


def _containers() -> list[Peer]:
    namespaces = "pid, mount, net, ipc, uts, user, cgroup"
    bwrap = _CONTAINER._replace(namespaces=namespaces, caps="none")
    jail = bwrap._replace(
        namespaces="pid, mount, net", filter="what is refused", files="all, read-only"
    )
    nspawn = _CONTAINER._replace(filter="what is refused", caps="none")
    podman = _CONTAINER._replace(filter="what is allowed", caps="processes")
    gone = commandlines.remove_cgroups
    return [
        Command(_BUBBLEWRAP, bwrap, _bubblewrap, version_of("bwrap", "--version")),
        Command("firejail", jail, commandlines.firejail, version_of("firejail", "--version")),
        Command("runc", _CONTAINER, commandlines.runc, version_of("runc", "--version"), gone),
        Command("crun", _CONTAINER, commandlines.crun, version_of("crun", "--version"), gone),
        Command("podman", podman, commandlines.podman, version_of("podman", "--version"), gone),
        Command(
            "systemd-nspawn", nspawn, commandlines.nspawn, version_of("systemd-nspawn", "--version")
        ),
    ]


def _elsewhere(peers: Path | None) -> list[Peer]:
    """Return what peers-setup installs."""
    where = (
        f"it is not in {peers}" if peers else "without --peers; benchmarks/peers-setup installs it"
    )
    monty = _IN_PROCESS._replace(
        fresh="session", files="none", network="none", python="a subset, written in Rust"
    )
    wasm = Isolation(
        "globals", "none", "none", "its own, in memory", "as node has it", "none",
        "the host's, behind WebAssembly", _CPYTHON,
    )  # fmt: skip
    scripts = (
        ("pydantic-monty", monty, "pydantic_monty", libraries.MONTY),
        ("RestrictedPython", _IN_PROCESS, "RestrictedPython", libraries.RESTRICTED),
        ("smolagents, local executor", _IN_PROCESS, "smolagents", libraries.SMOLAGENTS),
    )
    return [
        _sandbox_runtime(peers, where),
        *(
            Library(name, kept, libraries.python_worker(peers, package, script), where)
            for name, kept, package, script in scripts
        ),
        Library("Pyodide under node", wasm, libraries.node_worker(peers), where),
    ]


def _sandbox_runtime(peers: Path | None, where: str) -> Peer:
    kept = Isolation(
        "process, its namespaces", "pid, mount, net", "Unix sockets", "all, read-only",
        "none, by a proxy", "none", _HOST, _CPYTHON,
    )  # fmt: skip
    cli = (peers or Path()) / "js/node_modules/@anthropic-ai/sandbox-runtime/dist/cli.js"

    def version() -> str:
        if not peers or not cli.is_file() or not shutil.which("node"):
            raise AbsentError(where)
        return version_of("node", str(cli), "--version")()

    line = partial(commandlines.sandbox_runtime, cli.absolute())
    return Command("@anthropic-ai/sandbox-runtime", kept, line, version)


# Measuring


class Found(NamedTuple):
    peer: Peer
    version: str
    times: dict[str, list[float]]  # program -> seconds
    refusals: dict[str, str]  # program -> why it has none
    failures: list[str]  # of single runs, after it was seen to work


def measure(settings: Settings) -> Report:
    """Return the times of every peer that is here, and why the others are not."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cellwright-peers-")))
        found: list[Found] = []
        absent: dict[str, str] = {}
        for peer in every_peer(settings):
            stack.callback(peer.close)
            try:
                found.append(Found(peer, peer.find(place), {}, {}, []))
            except AbsentError as why:
                absent[peer.name] = str(why)
        for program in _PROGRAMS:
            _measure(settings, program, found)
    return _report(found, absent)


def _measure(settings: Settings, program: Program, found: list[Found]) -> None:
    contenders = []
    for each in found:
        try:
            first = min(each.peer.run(program), each.peer.run(program))
        except AbsentError as why:
            each.refusals[program.name] = str(why)
            continue
        seldom = _SELDOM if first > _SLOW_SECONDS else 1
        contenders.append(Contender(each.peer.name, partial(_clocked, each, program), every=seldom))
    times = side_by_side(contenders, settings.amount(300, 10))
    for each in found:
        good = [seconds for seconds in times.get(each.peer.name, []) if not isnan(seconds)]
        if good:
            each.times[program.name] = good


def _clocked(each: Found, program: Program) -> float:
    """Return the seconds of a run, or that there are none: a single failure is counted."""
    try:
        return each.peer.run(program)
    except AbsentError as why:
        each.failures.append(str(why))
        return nan


# What is said of it


def _report(found: list[Found], absent: dict[str, str]) -> Report:
    here = [each for each in found if each.times]
    absent = absent | {
        each.peer.name: "; ".join(dict.fromkeys(each.refusals.values()))
        for each in found
        if not each.times
    }
    missing = Table(
        title="Not here",
        columns=(Column("peer"), Column("why")),
        rows=tuple(absent.items()),
    )
    times = tuple(_times(program, here) for program in _PROGRAMS)
    return Report(
        name="peers",
        title="The same programs elsewhere",
        tables=(*times, _isolation(here), *([missing] if absent else [])),
        headlines=(msgspec.structs.replace(times[0], title="The same program elsewhere, `1+1`"),),
        charts=tuple(_bars(program, here) for program in _PROGRAMS),
        verdicts=_verdicts(here),
        notes=(
            "All print the same text, which is checked in every run.",
            "Libraries time their own calls in a worker that stays; commands are whole processes.",
            "Compare within a kind of isolation: the table below the times says what each has.",
        ),
        samples={
            f"{each.peer.name}: {program}": tuple(seconds)
            for each in here
            for program, seconds in each.times.items()
        },
    )


def _times(program: Program, here: list[Found]) -> Table:
    ours = next(each for each in here if each.peer.name == _READY)
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
    return Table(
        title=f"`{program.name}`",
        columns=(
            Column("peer"), Column("version"), *quartile_columns("ms"),
            Column("ratio", 1), Column("runs", 0), Column("new for each call"), Column("Python"),
        ),
        rows=tuple(_row(program, each, ours) for each in here),
        note=" ".join([*refusals, *failures]),
    )  # fmt: skip


def _row(program: Program, each: Found, ours: Found) -> tuple[Value, ...]:
    head = (each.peer.name, each.version)
    words = (each.peer.isolation.fresh, each.peer.isolation.python)
    times = each.times.get(program.name)
    if times is None:
        return (*head, None, None, None, None, None, *words)
    ratio = median(times) / median(ours.times[program.name])
    return (*head, *quartiles(times, _MS), ratio, len(times), *words)


def _isolation(here: list[Found]) -> Table:
    return Table(
        title="What stands between the program and the machine",
        columns=(Column("peer"), *(Column(name) for name in Isolation._fields)),
        rows=tuple((each.peer.name, *each.peer.isolation) for each in here),
        note="As each is run here.  `filter`: of system calls, by what it lists.",
    )


def _bars(program: Program, here: list[Found]) -> Bars:
    bars = [
        quartile_bar(each.peer.name, each.times[program.name], _MS)
        for each in here
        if program.name in each.times
    ]
    return Bars(
        title=f"{program.name}: one call",
        unit="milliseconds, medians with quartiles",
        bars=tuple(bars),
        logarithmic=True,
    )


def _verdicts(here: list[Found]) -> tuple[Verdict, ...]:
    medians = {
        each.peer.name: median(each.times[SUM.name]) for each in here if SUM.name in each.times
    }
    if _BUBBLEWRAP not in medians:
        return ()
    ratio = medians[_BUBBLEWRAP] / medians[_READY]
    return (
        Verdict(
            "a cell that stood ready is at least twice as quick as bubblewrap",
            ratio >= 2,
            f"{ratio:.1f} times",
        ),
    )

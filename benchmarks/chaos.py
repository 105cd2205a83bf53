"""Programs that run while processes are killed and stopped at random, with checkpoints."""

import contextlib
import gc
import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ..harness.sandbox.packages.package_store import PackageStore
from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sandbox_arguments import HostSettings
from ..policies.errors import CellwrightError, InternalError
from ..policies.profiles.loading import load_policy
from ..runner.settings import PauseSettings, PoolSettings
from ..runner.supervisor import OTHERS_CELLS
from . import checkpoints, faults
from .callers import WELL, Probe, Prober, ProbeResult, drawn, languages
from .census import Census, use_one_heap
from .checkpoints import Period
from .conversations import (
    Talk,
    repeat,
    with_branches,
    with_calls,
    with_pauses,
    with_programs,
    with_servers,
    with_sessions,
)
from .daemon import daemon
from .leak_checks import NOTES, LeakCheck, censuses, more, own_temporary_files, settled, whole
from .network import network_to, reachable_name
from .network_servers import server
from .packages import SMALL, write_wheel
from .report import Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings, sandbox

_SEED = 20260102
_MINUTES, _SMOKE_MINUTES = 1.0, 0.1
_CHECKPOINTS = 6
_WARM_UP_SECONDS = 60.0
_CALLERS, _SESSIONS, _PROGRAMS = 8, 2, 2
_BRANCHING, _PAUSING, _REACHING = 1, 1, 2
_WORKERS, _PLACING, _STAYING = 2, 2, 1
_BETWEEN_SECONDS = 0.5  # two faults, in the mean
_WALL_SECONDS = 5.0
_NAME = "faults at random"
_MEANING = (
    f"{_CALLERS} callers of every kind and language, clients of a daemon,",
    f"{_SESSIONS} sessions and {_PROGRAMS} programs that are talked with,",
    f"{_BRANCHING} session that branches, {_PAUSING} that is paused and resumed,",
    f"{_REACHING} programs at a time with a package and a way out to one name,",
    f"{_PLACING} callers of every form and {_STAYING} session, on {_WORKERS} workers.",
    f"A fault every {_BETWEEN_SECONDS:g} s, to processes and cgroups of the run and no others.",
    "At a checkpoint stopped processes go on, every language must run, and a census is taken.",
)


class Chaos:
    """Callers in threads of their own, and faults meanwhile."""

    def __init__(
        self,
        made: Sandbox,
        living: Sandbox,
        shared: Sandbox,
        equipped: Sandbox,
        place: Callable[[], AbstractContextManager[Sandbox]],
        server: dict[str, str | int],
        caller: Prober,
        hitting: faults.Faults,
    ) -> None:
        self._made = made
        self._living = living
        self._shared = shared
        self._equipped = equipped
        self._place = place  # makes a sandbox with workers
        self._server = server
        self._caller = caller
        self._faults = hitting
        self._chance = random.Random(_SEED)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._ends: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._longest = 0.0

    def period(self, seconds: float, before: Census | None) -> tuple[Period, Census]:
        """Have faults for so long; then all must work, and nothing be left."""
        self._forget()
        self._over.clear()
        hits = sum(self._faults.done.values())
        with (
            self._place() as placed
        ):  # for this period: chance decides how many connections it keeps
            self._talk(self._conversations(placed), seconds)
            self._recover(placed)
        census = settled(self._settle, before)
        left = more(before, census) if before else {}
        hits = sum(self._faults.done.values()) - hits
        return Period(self._ends, self._wrong, self._longest, hits, left), census

    def _talk(self, talks: tuple[tuple[Talk, Sandbox, int], ...], seconds: float) -> None:
        with ThreadPoolExecutor(_CALLERS + sum(count for *_, count in talks)) as threads:
            work = [threads.submit(self._call_on) for _ in range(_CALLERS)]
            for talk, cells, count in talks:
                work += [threads.submit(talk, cells, self._over, self._note) for _ in range(count)]
            self._hit_until(time.monotonic() + seconds)
            self._over.set()
        for each in work:
            each.result()

    def _hit_until(self, end: float) -> None:
        try:
            while time.monotonic() < end:
                time.sleep(self._chance.expovariate(1 / _BETWEEN_SECONDS))
                self._faults.hit()
        finally:
            self._over.set()
            self._faults.release()

    def _settle(self) -> None:
        self._made.settle()
        self._living.settle()
        self._shared.settle()
        self._equipped.settle()
        gc.collect()  # closes the pidfds of workers that have ended

    def _recover(self, placed: Sandbox) -> None:
        """Have every language run in as many cells as may be parked, here and there, and a session be
        paused: no fault is at work any more, so each must, and of those that died while they were
        parked none is left."""
        parked = {"python": PoolSettings().size}
        calls = [
            Probe(WELL, language)
            for language in languages()
            for _ in range(parked.get(language, OTHERS_CELLS) + 1)
        ]
        python = [call for call in calls if call.language == "python"]
        self._settle()  # the last killed processes have died by now
        for call, cells in (
            *itertools.product(calls, (self._made, self._shared)),
            *itertools.product(python, (self._living, self._equipped, placed)),
        ):
            if why := _why_not(cells, call):
                self._wrong.append(f"{call.language} does not run again: {why}")
        with self._made.session() as session:  # its launcher's image is kept from now on
            self._made.resume(session.pause()).close()

    # calls that run meanwhile

    def _conversations(self, placed: Sandbox) -> tuple[tuple[Talk, Sandbox, int], ...]:
        return (
            (with_sessions, self._made, _SESSIONS),
            (with_branches, self._made, _BRANCHING),
            (with_pauses, self._made, _PAUSING),
            (with_programs, self._living, _PROGRAMS),
            (with_servers(self._server), self._equipped, _REACHING),
            (with_calls, placed, _PLACING),
            (with_sessions, placed, _STAYING),
        )

    def _call_on(self) -> None:
        chance = random.Random(self._chance.random())
        while not self._over.is_set():
            self._note(partial(self._caller.make, drawn(1, chance)[0]))

    def _note(self, make: Callable[[], ProbeResult]) -> None:
        """Make a call, and note how it ended and whether it could end like that."""
        began = time.monotonic()
        try:
            end, complaint = _judged(make())
        except CellwrightError as error:
            end = type(error).__name__
            complaint = str(error) if isinstance(error, InternalError) else ""
        with self._lock:
            self._longest = max(self._longest, time.monotonic() - began)
            self._ends[end] += 1
            if complaint:
                self._wrong.append(complaint)


def _why_not(cells: Sandbox, call: Probe) -> str:
    """Make a call that has to end well; say why it did not."""
    try:
        result = cells.execute(call.program("up"), call.language)
    except CellwrightError as error:
        return str(error)
    return "" if result.ok else f"{result.reason}, {result.error}"


def _judged(answer: ProbeResult) -> tuple[str, str]:
    """Return how a call ended, and what is wrong with it: whatever was done to its cell, it may have
    said less than it should, and nothing else."""
    well = answer.result is not None and answer.result.ok
    if answer.heard == answer.nonce or (not answer.heard and not well):
        return answer.result.reason if answer.result else answer.did, ""
    return "wrong", f"wanted {answer.nonce}, heard {answer.heard[:40]!r}"


def measure(settings: Settings) -> Report:
    """Return verdicts on so many minutes with faults, and what was seen at each checkpoint."""
    rows: list[tuple[Value, ...]] = []
    use_one_heap()
    with own_temporary_files():
        seen, done = _leak_check(settings, rows)
    return Report(
        name="chaos",
        title="Faults at random",
        tables=(checkpoints.table(rows), done, censuses([seen])),
        verdicts=seen.verdicts(),
        notes=(*_MEANING, *NOTES),
    )


def _leak_check(settings: Settings, rows: list[tuple[Value, ...]]) -> tuple[LeakCheck, ReportTable]:
    """Have faults, and return what was seen and done; add a row for each checkpoint to `rows`."""
    minutes = settings.minutes or (_SMOKE_MINUTES if settings.smoke else _MINUTES)
    count = 1 if settings.smoke else _CHECKPOINTS
    seconds = minutes * 60 / count
    trail = Path(tempfile.gettempdir(), "cellwright-soak", "audit.jsonl")
    trail.parent.mkdir()
    of_workers = trail.with_name("workers.jsonl")
    with _chaos(settings, trail, of_workers) as (chaos, hitting):
        # objects that are made only once exist now
        _, before = chaos.period(min(seconds, _WARM_UP_SECONDS), None)
        periods: list[Period] = []
        census = before
        for number in range(1, count + 1):
            period, census = chaos.period(seconds, before)
            periods.append(period)
            rows.append(checkpoints.row(number * seconds / 60, period))
            print(*rows[-1], file=sys.stderr, flush=True)
    calls = sum(period.ends.total() for period in periods)
    wrong = [complaint for period in periods for complaint in period.wrong]
    verdicts = (
        *checkpoints.verdicts(_NAME, periods), whole(_NAME, trail),
        whole(f"{_NAME}, {_WORKERS} workers", of_workers),
    )  # fmt: skip
    return LeakCheck(_NAME, calls, wrong, before, census, verdicts), faults.table(hitting.done)


@contextlib.contextmanager
def _chaos(
    settings: Settings, trail: Path, of_workers: Path
) -> Iterator[tuple[Chaos, faults.Faults]]:
    short = replace(settings.policy.limits, wall_seconds=_WALL_SECONDS)
    mine = settings._replace(policy=replace(settings.policy, limits=short))
    with (
        scratch_directory() as place,
        daemon(settings) as path,
        sandbox(mine, audit=trail, pauses=PauseSettings(place / "paused")) as made,
        sandbox(_of_servers(settings), pool=0) as living,
        Sandbox(connect=path) as shared,
        _equipped(mine, place) as (equipped, given),
    ):
        hitting = faults.Faults(random.Random(_SEED), path)
        placed = partial(sandbox, mine, audit=of_workers, tools=(repeat,), workers=_WORKERS)
        prober = Prober(made, path)
        yield Chaos(made, living, shared, equipped, placed, given, prober, hitting), hitting


@contextlib.contextmanager
def _equipped(settings: Settings, place: Path) -> Iterator[tuple[Sandbox, dict[str, str | int]]]:
    """Give a sandbox whose programs have a package and may reach one server, and its name and port.

    Raises PolicyError where no name but localhost stands for this host's loopback.
    """
    own = reachable_name()
    wheels = place / "wheels"
    wheels.mkdir()
    write_wheel(wheels)
    store = PackageStore(
        place / "store", find_links=wheels, index=False,
        optional_layers=settings.policy.optional_layers,
    )  # fmt: skip
    with server(own.address) as port:
        policy = replace(
            settings.policy,
            network=network_to(own, port),
            packages=replace(settings.policy.packages, require=(SMALL.package,)),
        )
        with Sandbox(
            policy=policy, pool=PoolSettings(), audit=False, host=HostSettings(package_store=store)
        ) as made:
            yield made, {"name": own.name, "port": port}


def _of_servers(settings: Settings) -> Settings:
    """Have the profile for programs that live, but for their time."""
    server = load_policy("server")
    short = replace(server.limits, wall_seconds=_WALL_SECONDS)
    optional = settings.policy.optional_layers
    return settings._replace(policy=replace(server, limits=short, optional_layers=optional))

"""The trusted side: leases a cell for every request, watches it, and takes it down."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ..policies.errors import ClosedError, LauncherLost
from ..policies.languages import PYTHON, interpreter_of
from ..policies.plan import Plan
from ..policies.policy import Policy
from .cells.held_cell import HeldCell, make_cells
from .cells.pool import Pool
from .cgroups import CgroupUsage
from .cgroups.cgroup_tree import usage_at
from .concurrency import ConcurrencyLimit
from .launching.generation import Generation
from .launching.launch import LaunchArguments
from .launching.spawn import Spawned
from .requests.execution import called_off, look_at_files, phases, supervision_of
from .requests.outcome import conclude
from .requests.request import Request
from .requests.result import SandboxResult
from .settings import PoolSettings, SessionSettings
from .shared_files import SKILLS, SharedFiles
from .watching.supervision import Observation

if TYPE_CHECKING:
    from .cells.held_cell import LauncherClaim
    from .host.interpreters import HostInterpreter
    from .sessions.session_cell import SessionCell
    from .sessions.sessions import Sessions

Keep = Callable[[int], None]
_ATTEMPTS = 3  # for an execution whose launcher died before anything ran


class SupervisorState(NamedTuple):
    """The current state of one launcher's cells; memory and CPU time are None if nothing counts
    them."""

    ready: int  # parked cells
    wanted: int  # parked cells, once the pool is full
    running: int
    waiting: int  # calls that wait for their turn
    memory_bytes: int | None
    cpu_seconds: float | None  # CPU time over the launcher's life


class Supervisor:
    """Runs requests, each in a cell of its own, under one policy.  Safe from many threads."""

    def __init__(
        self, arguments: LaunchArguments, spawned: Spawned, settings: PoolSettings | None = None
    ) -> None:
        """Have the launcher that was `spawned` ready; raises what Generation raises."""
        self._spawned = spawned
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        settings = settings or PoolSettings(size=0)
        try:
            self._arguments = arguments.for_pool(spawned, settings)
            self._generation = Generation(spawned, self._arguments)
        except BaseException:
            spawned.close()
            raise
        self._cells_per_launcher = settings.cells_per_launcher
        self._concurrency = ConcurrencyLimit(settings.running, settings.queue_seconds)
        # Long-lived programs have slots of their own, because they may run for hours.
        self._programs = ConcurrencyLimit(settings.programs, settings.queue_seconds)
        try:
            self._pool = Pool(settings, self._make)
        except BaseException:
            self._generation.close()
            raise

    @property
    def policy(self) -> Policy:
        return self._arguments.policy

    @property
    def plan(self) -> Plan:
        return self._generation.plan

    @property
    def generation(self) -> Generation:
        """The launcher that makes cells now."""
        return self._generation

    def execute(self, request: Request, keep: Keep | None = None) -> SandboxResult:
        """Run `request` in a fresh cell and return its result.

        Everything in the cell has been killed then; without a pool nothing of it is left.  `keep` is
        called with a descriptor of /workspace once nothing of the program runs.  Raises ClosedError,
        BusyError, and LaunchError if the cell could not be built.
        """
        self._require_owner()  # before any lock, which another thread may have held at a fork
        asked_at = time.monotonic()
        concurrency = self._programs if request.program else self._concurrency
        if not concurrency.acquire(request.cancel):
            return called_off(request, asked_at, self._generation.plan.layers)
        attempts = 1
        try:
            while True:
                try:
                    return self._execute(request, asked_at, keep)
                except LauncherLost as lost:
                    self._require_another_try(lost, attempts)
                    attempts += 1
        finally:
            concurrency.release()

    def _require_another_try(self, lost: LauncherLost, attempts: int) -> None:
        """Return if work is to be tried again because its launcher died before any of a program ran;
        else raise the error that the caller of the work sees."""
        if self._closed:
            raise ClosedError("the sandbox was closed while this ran") from None
        if lost.cell_began or attempts == _ATTEMPTS:
            raise lost

    def _execute(self, request: Request, asked_at: float, keep: Keep | None) -> SandboxResult:
        parked = self._pool.lease()
        held = parked or self._make_one()
        try:
            leased_at = time.monotonic()
            seen = supervision_of(held, request).run()
            ended_at = time.monotonic()
            gpu = held.gpu_use(ends=True)
            held.cell.kill_init()
            network = held.settle_egress(ends=True)
            if keep:
                keep(held.workspace_at_rest())
            made = look_at_files(held.cell.workspace, request, {})
            counted = _count(held, seen)
            counted_at = time.monotonic()
        finally:
            self._pool.give_back(held)
        moments = (asked_at, leased_at, seen.sent_at, ended_at, counted_at, time.monotonic())
        return conclude(
            seen.refused(network.refused), counted, seen.captures, request.limits,
            layers=self._generation.plan.layers, phases=phases(moments),
            execution_time=moments[-1] - asked_at,
            execution_id=request.execution_id, trace_id=request.trace_id,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
            pool_hit=parked is not None, connections=network.connections, gpu=gpu,
        )  # fmt: skip

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the sandbox was made before this process was forked")

    def open_session(
        self, sessions: "Sessions", claim: "LauncherClaim | None" = None
    ) -> "SessionCell":
        """Return a cell that lives across requests, one of `sessions`, of the launcher of `claim` if
        there is one; raises BusyError if too many do, LaunchError."""
        self._require_owner()
        sessions.make_room()
        held = self._cell_of(claim)
        return sessions.admit(held, self.policy.limits, self._pool.give_back)

    def _cell_of(self, claim: "LauncherClaim | None") -> HeldCell:
        """Return a cell for more than one call, whose cgroup no other cell has afterwards."""
        held = self._any_cell_of(claim)
        held.cell.cgroup.retire()
        return held

    def _any_cell_of(self, claim: "LauncherClaim | None") -> HeldCell:
        if claim and claim.launcher_id != self._generation.id:
            return claim.make()
        held = self._pool.lease()
        if held and claim and held.origin.id != claim.launcher_id:  # the launcher was just replaced
            self._pool.give_back(held)
            held = None
        if held is None and claim:
            return claim.make()
        return held or self._make_surely()

    @contextlib.contextmanager
    def fresh_cell(self, claim: "LauncherClaim | None" = None) -> Iterator[HeldCell]:
        """Lend a cell in which nothing has run, and take it down afterwards; raises LaunchError."""
        self._require_owner()
        held = self._cell_of(claim)
        try:
            yield held
        finally:
            self._pool.give_back(held)

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have another launcher take over, which has imported `modules` beside those of the policy.

        Raises what Generation raises, such as PolicyError for a module that cannot be imported, and
        ClosedError; the launcher stays the same then.
        """
        self._require_owner()
        python = self.policy.python
        names = tuple(dict.fromkeys((*python.preload, *modules)))
        policy = replace(self.policy, python=replace(python, preload=names))
        arguments = self._arguments._replace(policy=policy)
        spawned = self._spawned.again()
        try:
            made = Generation(spawned, arguments)
        except BaseException:
            spawned.close()
            raise
        with self._lock:
            if closed := self._closed:
                old = made
            else:
                self._arguments = arguments
                old, self._generation = self._generation, made
        if closed:
            old.close()
            raise ClosedError("the sandbox was closed")
        old.replace()
        self._pool.refresh()

    def memory_bytes(self) -> int:
        """Return the anonymous memory of the launcher's processes."""
        return self._generation.launcher.memory_bytes()

    def state(self) -> "SupervisorState":
        """Return the current state and usage of its cells."""
        use = usage_at(self._generation.tree.places)
        return SupervisorState(
            *self._pool.level(), *self._concurrency.load(), use.memory_bytes, use.cpu_seconds
        )

    def settle(self) -> None:
        """Wait until the pool is as full as it gets and nothing of any past call is left."""
        self._pool.settle()
        self._generation.settle()

    def _make(self, count: int) -> Iterator[HeldCell]:
        generation = self._current()
        left = self._cells_per_launcher - generation.forks
        return make_cells(generation, max(1, min(count, left)))

    def _make_surely(self) -> HeldCell:
        for attempts in range(1, _ATTEMPTS + 1):
            try:
                return self._make_one()
            except LauncherLost as lost:
                self._require_another_try(lost, attempts)
        raise AssertionError("the last attempt returns or raises")

    def _make_one(self) -> HeldCell:
        (held,) = self._make(1)
        return held

    def _current(self) -> Generation:
        """Return the launcher to fork from; one that died or has served its time is replaced."""
        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            old = self._generation
            if not old.is_current() or old.forks >= self._cells_per_launcher:
                old.retire()
                self._generation = Generation(self._spawned.again(), self._arguments)
            return self._generation

    def close(self) -> None:
        """End every cell and the launcher, and leave nothing behind.  Closing twice is fine."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._concurrency.close()
        self._programs.close()
        self._generation.close()
        self._pool.close()


def _count(held: HeldCell, seen: Observation) -> CgroupUsage:
    ended_well = bool(seen.finished and seen.finished.ends_well)
    usage = held.cell.cgroup.usage(ended_well=ended_well)
    if usage.cpu_user_seconds is None or usage.memory_peak_bytes is None:
        ended = held.account()  # wait4(2) misses children whose parent ignores SIGCHLD
        reported = CgroupUsage(
            ended.cpu_user_seconds, ended.cpu_system_seconds, ended.max_rss_bytes
        )._asdict()
        counted = {name: each for name, each in usage._asdict().items() if each is not None}
        usage = CgroupUsage(**(reported | counted))
    return usage


OTHERS_CELLS = 2  # parked cells of each pool but the first


class SupervisorSettings(NamedTuple):
    """Settings that the supervisors of one sandbox share.

    `spawn` starts another launcher.  `launch` is for the policy of the sandbox and Python.
    `interpreters` are those of other languages, and `shared_files` returns the files that cells of a
    language see.
    """

    spawn: Callable[[], Spawned]
    launch: LaunchArguments
    pool: PoolSettings
    interpreters: Mapping[str, str]
    shared_files: Callable[[str], Mapping[str, SharedFiles]]

    def first(
        self, policy: Policy, language: str, spawned: Spawned,
        interpreter: "HostInterpreter | None" = None,
    ) -> Supervisor:  # fmt: skip
        """Return the supervisor of a launcher that was `spawned`; `interpreter` is that of a
        language of the table.  Raises what Supervisor raises."""
        is_named = interpreter is None and language != PYTHON
        path = self.interpreters.get(interpreter_of(language), "") if is_named else ""
        launch = self.launch._replace(
            policy=policy,
            language=language,
            interpreter=interpreter or path,
            shared_files=self.shared_files(language),
        )
        return Supervisor(launch, spawned, self.pool)

    def another(self, policy: Policy, language: str) -> Supervisor:
        """Return the supervisor of another language or set of packages, with a smaller pool."""
        pool = self.pool._replace(size=min(self.pool.size, OTHERS_CELLS))
        return self._replace(pool=pool).first(policy, language, self.spawn())

    def running(self, policy: Policy, interpreter: "HostInterpreter") -> Supervisor:
        """Return the supervisor of cells for programs of a language of the table."""
        return self.first(policy, interpreter.language, self.spawn(), interpreter)

    def compiling(self, policy: Policy) -> Supervisor:
        """Return a supervisor for compilers, whose cells see nothing but what `policy` shows."""
        pool = self.pool._replace(size=min(self.pool.size, 1))
        alone = self._replace(
            pool=pool, shared_files=lambda _: {}, launch=self.launch._replace(egress=None)
        )
        return alone.first(policy, PYTHON, self.spawn())

    def replaying(self, policy: Policy, language: str, skills: SharedFiles) -> Supervisor:
        """Return a supervisor without a pool or network, whose cells see only `skills`."""
        alone = self._replace(
            pool=self.pool._replace(size=0),
            shared_files=lambda _: {SKILLS: skills},
            launch=self.launch._replace(egress=None),
        )
        return alone.another(policy, language)


class SupervisorsState(NamedTuple):
    """The current state of one sandbox's cells; `frozen` sessions are alive too."""

    supervisors: tuple[SupervisorState, ...]
    sessions: int
    frozen: int
    paused: int = 0  # paused sessions, which have no cell and are not alive


class Supervisors:
    """The supervisors of one sandbox: the first, and others made when their language is first used;
    safe from many threads."""

    def __init__(
        self, language: str, first: Supervisor, make: Callable[[str], Supervisor],
        settings: SessionSettings, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._language = language
        self.first = first
        self._make = make
        self._settings = settings
        self._clock = clock
        self._sessions: Sessions | None = None
        self._lock = threading.Lock()
        self._others: dict[str, Supervisor] = {}
        self._closed = False

    def of(self, language: str) -> Supervisor:
        """Return the supervisor of `language`; raises LaunchError that names a missing package."""
        if language == self._language:
            return self.first
        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            if language not in self._others:
                self._others[language] = self._make(language)
            return self._others[language]

    def open_session(
        self, supervisor: Supervisor, claim: "LauncherClaim | None" = None
    ) -> "SessionCell":
        """Return a session cell of a supervisor, which may be that of a set of packages; of the
        launcher of `claim`, if there is one.

        Raises BusyError if too many sessions of the sandbox live, and LaunchError.
        """
        return supervisor.open_session(self.counted(), claim)

    def make_room(self, patience_seconds: float) -> None:
        """Pause or evict idle sessions if there are too many; raises BusyError if each is busy for so
        long."""
        self.counted().make_room(patience_seconds)

    def counted(self) -> "Sessions":
        """Return what counts the sessions of the sandbox."""
        from .sessions.sessions import Sessions  # a command that runs one program opens no session

        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            if self._sessions is None:
                self._sessions = Sessions(self._settings, self._clock)
            return self._sessions

    def state(self) -> "SupervisorsState":
        """Return the current state of the supervisors of all languages."""
        alive, frozen = self._sessions.count() if self._sessions else (0, 0)
        return SupervisorsState(tuple(each.state() for each in self._all()), alive, frozen)

    def settle(self) -> None:
        for supervisor in self._all():
            supervisor.settle()

    def close(self) -> None:
        """End every cell and launcher.  May be called twice."""
        with self._lock:
            self._closed = True
        if self._sessions:
            self._sessions.close()
        for supervisor in self._all():
            supervisor.close()

    def _all(self) -> list[Supervisor]:
        with self._lock:
            return [self.first, *self._others.values()]

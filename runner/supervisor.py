"""The trusted side: leases a cell for every request, watches it, and takes it down."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from ..policies.errors import ClosedError, LauncherLost
from ..policies.languages import PYTHON
from ..policies.plan import Plan
from ..policies.policy import Policy
from .capture import OnOutput
from .cgroups import CgroupUsage
from .cgroups.tree import usage_at
from .concurrency import NEVER, ConcurrencyLimit
from .execution import called_off, look_at_files, perform, phases
from .generation import NO_FILES, Generation
from .held_cell import HeldCell
from .messages import Ended
from .outcome import conclude
from .pool import Pool
from .request import Request
from .result import SandboxResult
from .settings import PoolSettings
from .shared_files import SharedFiles
from .spawn import Spawned
from .watching.supervision import Observation

if TYPE_CHECKING:
    from ..policies.learning import Lessons
    from .egress_process import EgressProcess
    from .launcher_claim import LauncherClaim
    from .session import SessionCell
    from .sessions import Sessions

Keep = Callable[[int], None]
_Result = TypeVar("_Result")
_ATTEMPTS = 3  # for an execution of which nothing ran, because the launcher had died


class SupervisorState(NamedTuple):
    """What the cells of one launcher do now; memory and CPU time are None where nothing counts."""

    ready: int  # parked cells
    wanted: int  # parked cells, once the pool is full
    running: int
    waiting: int  # calls that wait for their turn
    memory_bytes: int | None
    cpu_seconds: float | None  # of the launcher's life


class Supervisor:
    """Runs requests, each in a cell of its own, under one policy.  Safe from many threads."""

    def __init__(
        self, policy: Policy, spawned: Spawned, cgroup_root: str | None = None,
        settings: PoolSettings | None = None, lessons: "Lessons | None" = None,
        language: str = PYTHON, interpreter: str = "",
        shared_files: Mapping[str, SharedFiles] = NO_FILES, user: int | str | None = None,
        egress: "EgressProcess | None" = None,
    ) -> None:  # fmt: skip
        """Have the launcher that was `spawned` ready; raises what Generation raises."""
        self._policy = policy
        self._spawned = spawned
        self._cgroup_root = cgroup_root
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._lessons = lessons
        settings = settings or PoolSettings(size=0)
        # Once, so that no later launcher shows what somebody has put in a path's place by then.
        try:
            self._runs = (
                language, interpreter, shared_files, spawned.sources_of(policy), user, egress,
                settings.cells_per_network if settings.size else 1,  # without a pool nothing is kept
                settings.cells_per_launcher == 1,
            )  # fmt: skip
            self._generation = Generation(policy, spawned, cgroup_root, lessons, *self._runs)
        except BaseException:
            spawned.close()
            raise
        self._cells_per_launcher = settings.cells_per_launcher
        self._concurrency = ConcurrencyLimit(settings.running, settings.queue_seconds)
        # Programs may live for hours, so they do not use up the calls' slots.
        self._programs = ConcurrencyLimit(settings.programs, settings.queue_seconds)
        try:
            self._pool = Pool(settings, self._make)
        except BaseException:
            self._generation.close()
            raise

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def plan(self) -> Plan:
        return self._generation.plan

    @property
    def generation(self) -> Generation:
        """The launcher that makes cells now."""
        return self._generation

    def execute(
        self, request: Request, on_output: OnOutput | None = None, cancel: int = NEVER,
        keep: Keep | None = None,
    ) -> SandboxResult:  # fmt: skip
        """Run `request` in a fresh cell and return what came of it.

        Everything in the cell has been killed then; without a pool nothing of it is left.  `cancel`
        is a descriptor: once it is readable the execution is ended.  `keep` is called with a
        descriptor of /workspace once nothing of the program runs.  Raises ClosedError, BusyError,
        and LaunchError if the cell could not be built.
        """
        self._require_owner()  # before any lock: another thread may have held it
        asked_at = time.monotonic()
        concurrency = self._programs if request.program else self._concurrency
        if not concurrency.acquire(cancel):
            return called_off(request, asked_at, self.plan.layers)
        try:
            return self._while_launchers_die(
                lambda: self._execute(request, asked_at, on_output, cancel, keep)
            )
        finally:
            concurrency.release()

    def _while_launchers_die(self, work: Callable[[], _Result]) -> _Result:
        """Do `work`, and again if the launcher died before any of a program ran."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return work()
            except LauncherLost as lost:
                if self._closed:
                    raise ClosedError("the sandbox was closed while this ran") from None
                if lost.cell_began:
                    raise
        return work()

    def _execute(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int,
        keep: Keep | None,
    ) -> SandboxResult:  # fmt: skip
        parked = self._pool.lease()
        held = parked or self._make_one()
        try:
            leased_at = time.monotonic()
            performed = perform(held, request, on_output, cancel)
            ended_at = time.monotonic()
            held.cell.kill_init()
            network = held.settle_egress(ends=True)
            if keep:
                keep(held.workspace_at_rest())
            made = look_at_files(held.cell.workspace, request, {}, cancel)
            counted = _count(held, performed.seen)
            counted_at = time.monotonic()
        finally:
            self._pool.give_back(held)
        sent_at = performed.seen.sent_at
        moments = (asked_at, leased_at, sent_at, ended_at, counted_at, time.monotonic())
        return conclude(
            performed.seen.refused(network.refused), counted, performed.captures, request.limits,
            layers=self.plan.layers, phases=phases(moments),
            execution_time=moments[-1] - asked_at,
            execution_id=request.execution_id, trace_id=request.trace_id,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
            pool_hit=parked is not None, connections=network.connections,
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
        held, limits = self._cell_of(claim), self._policy.limits
        plan = held.plan
        return sessions.admit(held, plan.layers, limits, self._pool.give_back, plan.language)

    def _cell_of(self, claim: "LauncherClaim | None") -> HeldCell:
        if claim and claim.launcher_id != self._generation.id:
            return claim.make()
        held = self._pool.lease()
        if held and claim and held.launcher_id != claim.launcher_id:  # it was replaced just now
            self._pool.give_back(held)
            held = None
        if held is None and claim:
            return claim.make()
        return held or self._while_launchers_die(self._make_one)

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
        python = self._policy.python
        names = tuple(dict.fromkeys((*python.preload, *modules)))
        policy = replace(self._policy, python=replace(python, preload=names))
        spawned = self._spawned.again()
        try:
            made = Generation(policy, spawned, self._cgroup_root, self._lessons, *self._runs)
        except BaseException:
            spawned.close()
            raise
        with self._lock:
            if closed := self._closed:
                old = made
            else:
                self._policy = policy
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
        """Return what its cells do and use now."""
        use = usage_at(self._generation.tree.places)
        return SupervisorState(
            *self._pool.level(), *self._concurrency.load(), use.memory_bytes, use.cpu_seconds
        )

    def settle(self) -> None:
        """Wait until the pool is as full as it gets and nothing of any past call is left."""
        self._pool.settle()

    def _make(self, count: int) -> Iterator[HeldCell]:
        """Yield up to `count` new cells of one launcher, at least one."""
        generation = self._current()
        return generation.make(max(1, min(count, self._cells_per_launcher - generation.forks)))

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
                spawned = self._spawned.again()
                self._generation = Generation(
                    self._policy, spawned, self._cgroup_root, self._lessons, *self._runs
                )
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
    """Ask the cgroup what the cell used; where nothing counts, ask who ended it."""
    ended_well = bool(seen.finished and seen.finished.ends_well)
    usage = held.cell.cgroup.usage(ended_well=ended_well)
    if usage.cpu_user_seconds is None or usage.memory_peak_bytes is None:
        usage = _or_else(usage, held.account())
    return usage


def _or_else(usage: CgroupUsage, ended: Ended) -> CgroupUsage:
    """Fill in what wait4(2) said; it misses children whose parent ignores SIGCHLD."""
    counted = usage._asdict() | {
        name: value for name, value in _counts(ended).items() if getattr(usage, name) is None
    }
    return CgroupUsage(**counted)


def _counts(ended: Ended) -> dict[str, float | int]:
    return {
        "cpu_user_seconds": ended.cpu_user_seconds,
        "cpu_system_seconds": ended.cpu_system_seconds,
        "memory_peak_bytes": ended.max_rss_bytes,
    }

"""The trusted side: leases a cell for every request, watches it, and takes it down."""

import itertools
import os
import threading
import time

import msgspec

from ..policies.errors import ClosedError, LauncherLost
from ..policies.learning import Lessons
from ..policies.plan import Plan
from ..policies.policy import Limits, Policy
from .capture import Capture, OnOutput
from .cgroups import Usage
from .custody import Custody
from .generation import Generation
from .messages import InputFile, Reaped, Run, encode
from .outcome import Count, conclude
from .pool import Pool, PoolSettings
from .result import Phases, SandboxResult
from .spawn import Spawned
from .supervision import Observation, Supervision, Work
from .turns import Turns

_ATTEMPTS = 3  # for an execution of which nothing ran, because the launcher had died
NEVER = -1  # no descriptor: the execution cannot be cancelled


def new_execution_id() -> str:
    return os.urandom(16).hex()  # never from a clock: clones collide (fcvm#719)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, checked: what to run and what to give it."""

    code: str
    inputs: bytes = b"{}"  # a JSON object
    files: tuple[InputFile, ...] = ()
    environment: dict[str, str] = {}
    stdin: bytes | None = None
    limits: Limits = Limits()
    trace_id: str | None = None
    execution_id: str = msgspec.field(default_factory=new_execution_id)


class Supervisor:
    """Runs requests, each in a cell of its own, under one policy.  Safe from many threads."""

    def __init__(
        self, policy: Policy, spawned: Spawned, cgroup_root: str | None = None,
        settings: PoolSettings | None = None, lessons: Lessons | None = None,
    ) -> None:  # fmt: skip
        """Have the launcher that was `spawned` ready; raises what Generation raises."""
        self._policy = policy
        self._executable = spawned.executable
        self._cgroup_root = cgroup_root
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._lessons = lessons
        self._generation = Generation(policy, spawned, cgroup_root, lessons)
        settings = settings or PoolSettings(size=0)
        self._cells_per_launcher = settings.cells_per_launcher
        self._turns = Turns(settings.running, settings.queue_seconds)
        self._pool = Pool(settings, lambda: self._make(parked=True))

    @property
    def plan(self) -> Plan:
        return self._generation.plan

    @property
    def generation(self) -> Generation:
        """The launcher that makes cells now."""
        return self._generation

    def execute(
        self, request: Request, on_output: OnOutput | None = None, cancel: int = NEVER
    ) -> SandboxResult:
        """Run `request` in a fresh cell and return what came of it.

        Everything in the cell has been killed then; without a pool nothing of it is left.  `cancel`
        is a descriptor: once it is readable the execution is ended.  Raises ClosedError, BusyError,
        and LaunchError if the cell could not be built.
        """
        if os.getpid() != self._owner:  # before any lock: another thread may have held it
            raise ClosedError("the sandbox was made before this process was forked")
        asked_at = time.monotonic()
        self._turns.take()
        try:
            return self._execute_while_launchers_die(request, asked_at, on_output, cancel)
        finally:
            self._turns.end()

    def _execute_while_launchers_die(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._execute(request, asked_at, on_output, cancel)
            except LauncherLost as lost:
                if self._closed:
                    raise ClosedError("the sandbox was closed while this ran") from None
                if lost.cell_began:
                    raise
        return self._execute(request, asked_at, on_output, cancel)

    def _execute(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        parked = self._pool.lease()
        custody = parked or self._make()
        leased_at = time.monotonic()
        limits = request.limits
        try:
            captures = _captures(custody, limits.output_bytes, on_output)
            work = Work(_program(request), request.stdin or b"", limits, captures, cancel)
            seen = Supervision(custody, work).run()
            ended_at = time.monotonic()
            custody.cell.kill_init()
            counted = _count(custody, seen)
            counted_at = time.monotonic()
        finally:
            self._pool.give_back(custody)
        moments = (asked_at, leased_at, seen.sent_at, ended_at, counted_at, time.monotonic())
        return conclude(
            seen, counted, captures, limits,
            layers=self.plan.layers, phases=_phases(moments),
            execution_time=moments[-1] - asked_at,
            execution_id=request.execution_id, trace_id=request.trace_id,
            pool_hit=parked is not None,
        )  # fmt: skip

    def settle(self) -> None:
        """Wait until the pool is as full as it gets and nothing of any past call is left."""
        self._pool.settle()

    def _make(self, *, parked: bool = False) -> Custody:
        return self._current().make(parked=parked)

    def _current(self) -> Generation:
        """Return the launcher to fork from; one that died or has served its time is replaced."""
        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            old = self._generation
            if not old.is_alive() or old.forks >= self._cells_per_launcher:
                old.retire()
                spawned = Spawned(self._executable)
                self._generation = Generation(
                    self._policy, spawned, self._cgroup_root, self._lessons
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
        self._turns.close()
        self._generation.close()
        self._pool.close()


def _program(request: Request) -> bytes:
    return encode(
        Run(
            request.code, request.inputs, request.files, request.environment,
            request.limits.value_bytes,
        )
    )  # fmt: skip


def _phases(moments: tuple[float, ...]) -> Phases:
    return Phases(*(later - earlier for earlier, later in itertools.pairwise(moments)))


def _captures(custody: Custody, limit: int, on_output: OnOutput | None) -> tuple[Capture, Capture]:
    stdout = Capture("stdout", custody.cell.stdout, limit, on_output)
    return stdout, Capture("stderr", custody.cell.stderr, limit, on_output)


def _count(custody: Custody, seen: Observation) -> Count:
    """Ask the cgroup what the cell used; where nothing counts, ask who reaped it."""
    cgroup = custody.cell.cgroup
    usage = cgroup.usage()
    if usage.cpu_user_seconds is None or usage.memory_peak_bytes is None:
        usage = _or_else(usage, custody.retire())
    ended_well = seen.finished and seen.finished.ends_well
    return Count(usage, 0 if ended_well else cgroup.oom_kills())


def _or_else(usage: Usage, reaped: Reaped) -> Usage:
    """Fill in what wait4(2) said; it misses children whose parent ignores SIGCHLD."""
    counted = usage._asdict() | {
        name: value for name, value in _counts(reaped).items() if getattr(usage, name) is None
    }
    return Usage(**counted)


def _counts(reaped: Reaped) -> dict[str, float | int]:
    return {
        "cpu_user_seconds": reaped.cpu_user_seconds,
        "cpu_system_seconds": reaped.cpu_system_seconds,
        "memory_peak_bytes": reaped.max_rss_bytes,
    }

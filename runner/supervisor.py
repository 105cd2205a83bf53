"""The trusted side: one launcher, its cgroups, and an execution at a time per calling thread."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator

import msgspec

from ..policies.errors import ClosedError, LauncherLost
from ..policies.plan import Plan
from ..policies.policy import Limits, Policy
from .capture import Capture, OnOutput
from .cells import Cell
from .cgroups import Cgroup, CgroupTree, NoCgroups, open_tree
from .cgroups.tree import Caps
from .launching import Launcher
from .listener import Listener
from .messages import Boot, InputFile, Run, encode
from .outcome import Count, conclude
from .plans import plan_for
from .probe import probe_host
from .result import SandboxResult
from .runtime import find_runtime
from .shown import Shown
from .spawn import Spawned
from .supervision import Supervision

# Above every id that distributions give out (systemd's UIDS-GIDS.md: from 0x70000000 on unused),
# and one for each living supervisor, so that no two of them share a uid's quotas.
_FIRST_HOST_UID = 0x70000000
_ATTEMPTS = 3  # for an execution of which nothing ran, because the launcher had died
NEVER = -1  # no descriptor: the execution cannot be cancelled


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, checked: what to run and what to give it."""

    code: str
    inputs: bytes = b"{}"  # a JSON object
    files: tuple[InputFile, ...] = ()
    environment: dict[str, str] = {}
    stdin: bytes | None = None
    limits: Limits = Limits()
    trace_id: str | None = None


class Supervisor:
    """Runs requests, each in a cell of its own, under one policy.  Safe from many threads."""

    def __init__(self, policy: Policy, spawned: Spawned, cgroup_root: str | None = None) -> None:
        """Have the launcher that was `spawned` ready.

        Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError if the launcher
        cannot be set up.
        """
        self._policy = policy
        self._executable = spawned.executable
        self._cgroup_root = cgroup_root
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._names = itertools.count()
        self._leftovers: list[Cgroup] = []  # what was busy when it should have gone
        self._retired: list[CgroupTree] = []
        self._closed = False
        self._start(spawned)

    def _start(self, spawned: Spawned) -> None:
        self._launcher = Launcher(spawned)  # imports while we work out what to tell it
        self._tree: CgroupTree = NoCgroups("not looked for yet")
        try:
            self._tree = open_tree(self._launcher.keeper, self._cgroup_root)
            self.plan: Plan = plan_for(self._policy, probe_host(self._tree.missing))
            boot = self._boot_frame()
            self._shown = Shown(boot)
            self._launcher.boot(boot)
            self._tree.admit(*self._launcher.pids(), self._host_uid)
        except BaseException:
            self._launcher.close()
            self._tree.close()
            raise

    @property
    def _host_uid(self) -> int:
        return os.geteuid() or _FIRST_HOST_UID + os.getpid()

    def _boot_frame(self) -> Boot:
        runtime = find_runtime(self._executable)
        files = runtime.files
        if self._policy.processes.subprocesses:
            files = (*files, *runtime.programs)
        return Boot(self.plan, files, runtime.links, runtime.hidden, self._host_uid)

    def execute(
        self, request: Request, on_output: OnOutput | None = None, cancel: int = NEVER
    ) -> SandboxResult:
        """Run `request` in a fresh cell and return what came of it, when nothing of it is left.

        `cancel` is a descriptor: once it is readable the execution is ended.  Raises ClosedError,
        and LaunchError if the cell could not be built.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._execute(request, on_output, cancel)
            except LauncherLost as lost:
                if self._closed:
                    raise ClosedError("the sandbox was closed while this ran") from None
                if lost.cell_began:
                    raise
        return self._execute(request, on_output, cancel)

    def _execute(self, request: Request, on_output: OnOutput | None, cancel: int) -> SandboxResult:
        began = time.monotonic()
        limits = request.limits
        with self._fresh_cell(with_stdin=request.stdin is not None) as cell:
            captures = _captures(cell, limits.output_bytes, on_output)
            frame = encode(self._run_frame(request))
            seen = Supervision(
                cell, frame, request.stdin or b"", limits, captures, cancel, self._listen
            ).run()
            counted = Count(cell.cgroup.usage(), cell.cgroup.oom_kills())
        return conclude(
            seen, counted, captures, limits,
            layers=self.plan.layers, execution_time=time.monotonic() - began,
            execution_id=self.new_execution_id(), trace_id=request.trace_id,
        )  # fmt: skip

    def _listen(self, descriptor: int) -> Listener:
        return Listener(descriptor, self.plan, self._shown, self._policy.limits.violations)

    @staticmethod
    def new_execution_id() -> str:
        return os.urandom(16).hex()  # never from a clock: clones collide (fcvm#719)

    def _run_frame(self, request: Request) -> Run:
        return Run(
            request.code, request.inputs, request.files, request.environment,
            request.limits.value_bytes,
        )  # fmt: skip

    @contextlib.contextmanager
    def _fresh_cell(self, *, with_stdin: bool) -> Iterator[Cell]:
        """A cell in the making; afterwards nothing of it is left, whatever happened."""
        cell = self._make_cell(with_stdin=with_stdin)
        try:
            yield cell
        except BaseException:
            cell.kill()
            raise
        finally:
            cell.close()
            self._remove(cell.cgroup)

    def _make_cell(self, *, with_stdin: bool) -> Cell:
        """Ask for a cell.  One thread at a time: a launcher that died is replaced only here, and
        what belongs to one launcher must not be used with the next."""
        with self._lock:
            self._ensure_launcher()
            cell = Cell(self._create_cgroup(), with_stdin=with_stdin)
            try:
                self._launcher.fork(cell)
            except BaseException:
                cell.close()
                self._remove(cell.cgroup)
                raise
            return cell

    def _create_cgroup(self) -> Cgroup:
        caps = Caps(self.plan.memory_bytes, self.plan.cpus, self.plan.processes)
        return self._tree.create(f"cell-{next(self._names)}", caps)

    def _ensure_launcher(self) -> None:
        if self._closed or os.getpid() != self._owner:
            raise ClosedError("the sandbox was closed, or made before this process was forked")
        if not self._launcher.is_alive():
            self._stop()
            self._start(Spawned(self._executable))

    def _remove(self, cgroup: Cgroup) -> None:
        """Remove a cgroup, now or when what was killed in it has died."""
        with self._lock:
            self._leftovers = [each for each in [*self._leftovers, cgroup] if not each.remove()]
            for tree in self._retired:  # an execution may outlive its launcher by a moment
                tree.close()

    def close(self) -> None:
        """End every cell and the launcher, and leave nothing behind.  Closing twice is fine."""
        with self._lock:
            if not self._closed and os.getpid() == self._owner:
                self._closed = True
                self._stop()

    def _stop(self) -> None:
        """End the launcher, and so every cell; a tree goes when the last cgroup in it has gone."""
        self._launcher.close()
        self._leftovers = [each for each in self._leftovers if not each.remove()]
        self._retired.append(self._tree)
        for tree in self._retired:
            tree.close()


def _captures(cell: Cell, limit: int, on_output: OnOutput | None) -> tuple[Capture, Capture]:
    stdout = Capture("stdout", cell.stdout, limit, on_output)
    return stdout, Capture("stderr", cell.stderr, limit, on_output)

"""One launcher, its cgroups, and the cells that are forked from it."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from ..policies.errors import CellwrightError, InternalError, LauncherLost, LaunchError, PolicyError
from ..policies.languages import PYTHON
from ..policies.learning import Lessons
from ..policies.plan import CERTIFICATES, FIXED_ADDRESSES, PathRule, Plan
from ..policies.policy import Policy, lies_in
from .cells import Cell
from .cgroups import Cgroup, CgroupTree, NoCgroups, open_tree
from .cgroups.tree import Caps
from .covers import Covers
from .egress_process import CellEgress, EgressProcess
from .held_cell import HeldCell
from .host.ids import id_for
from .host.paths import lead_elsewhere, leads, sources_of
from .host.plans import plan_for
from .host.probe import probe_host
from .host.runtime import Runtime, find_runtime
from .launching import Launcher
from .living import KeptRecord, keep_record
from .messages import Boot
from .shared_files import SharedFiles
from .spawn import Spawned
from .watching.listener import Listener
from .watching.shown import Shown

if TYPE_CHECKING:
    from .cell_network import CellNetwork
    from .host.interpreters import HostInterpreter

NO_FILES: Mapping[str, SharedFiles] = MappingProxyType({})
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the cell's own


class Generation:
    """Makes cells until it is retired; is gone when the last of them is."""

    def __init__(
        self, policy: Policy, spawned: Spawned, cgroup_root: str | None,
        lessons: Lessons | None = None, language: str = PYTHON, interpreter: str = "",
        shared_files: Mapping[str, SharedFiles] = NO_FILES, sources: Mapping[str, str] | None = None,
        user: int | str | None = None, egress: EgressProcess | None = None,
        cells_per_network: int = 1,
    ) -> None:  # fmt: skip
        """Have the launcher that was `spawned` ready; with `lessons`, add to them what programs need.

        `interpreter` is the path of that of `language`, where it is not in the usual places.  Cells see
        the `shared_files`, by their places.  `sources` are the policy's paths as they were resolved, if
        they were.  `user` is whose id cells have on the host where root starts them
        (host/ids.py).  `egress` serves cells whose policy allows names of the network.
        `cells_per_network` cells have one network namespace, one after the other, if the plan lets them
        share it.

        Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError if the launcher
        cannot be set up.
        """
        self._policy = policy
        self._lessons = lessons
        self._shared_files = shared_files
        self._user = user
        self._egress = egress
        self._cells_per_network = cells_per_network
        self._shared_directories: tuple[int, ...] = ()  # where what cells see is written
        self._covers: Covers | None = None  # of what the policy hides
        self._sources = sources_of(policy) if sources is None else sources
        self._interpreter: HostInterpreter | None = None
        self._names = itertools.count()
        self.id = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._leftovers: list[Cgroup] = []  # what was busy when it should have gone
        self._living = 0
        self._retired = self._lost = self._replaced = False
        self._record: KeptRecord | None = None
        self.forks = 0  # how many cells were asked of it
        self.launcher = Launcher(spawned)  # imports while we work out what to tell it
        self.tree: CgroupTree = NoCgroups("not looked for yet")
        try:
            self.tree = open_tree(self.launcher.keeper, cgroup_root)
            self.launcher.require_alive()  # for the dead no scope can be had: that is not the cause
            host = probe_host(self.tree.missing)
            runtime = find_runtime(spawned.executable)
            if language != PYTHON:
                # Most run Python, and need no subprocess.
                from .host.interpreters import find_interpreter

                self._interpreter = find_interpreter(language, runtime, interpreter)
            self.plan: Plan = plan_for(
                policy, host, learning=lessons is not None, interpreter=self._interpreter
            )
            if spawned.has_fixed_addresses:
                layers = (*self.plan.layers, FIXED_ADDRESSES)
                self.plan = msgspec.structs.replace(self.plan, layers=layers)
            self.boot = self._boot_frame(runtime)
            self._shown = Shown(self.boot)
            self._admit()
            self._shared_directories, self._covers = self.launcher.boot(self.boot)
            if self._covers:
                self._covers.watch(self.plan, self._sources)
            for files, directory in self._shared():
                files.attach(directory)
            self._record = keep_record(
                "sandbox", self.launcher.keeper, policy.name, language, self.tree.places,
                control=egress.control if egress else "",
            )  # fmt: skip
        except BaseException as error:
            self._take_down()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot set up: {error}") from None
            raise

    def _shared(self) -> Iterator[tuple[SharedFiles, int]]:
        """Yield the shared files with the directory of this launcher for them."""
        return zip(self._shared_files.values(), self._shared_directories, strict=False)

    def _admit(self) -> None:
        """Move the keeper before it forks: nursery, launcher and inits begin where it is.

        On cgroup v1 the kernel takes a millisecond for each process and controller (measured).
        """
        try:
            self.tree.admit(self.launcher.keeper, self.boot.host_uid)
        except ProcessLookupError:
            raise LauncherLost(cell_began=False) from None
        except OSError as error:
            raise LaunchError(f"cannot write {error.filename}: {error.strerror}") from None

    def _boot_frame(self, runtime: Runtime) -> Boot:
        if self.plan.python_path:
            from .host.packages import with_packages  # most do without, and without subprocess

            runtime = with_packages(runtime, self.plan.python_path)
        files, links = runtime.files, runtime.links
        if self._policy.processes.subprocesses:
            links = (*links, *runtime.names())
        if self._policy.processes.subprocesses or self._interpreter:
            files = (*files, *runtime.programs)
        if self._interpreter:
            files, links = (*files, *self._interpreter.files), (*links, *self._interpreter.links)
        certificates = self._certificates()
        files = (*files, *certificates)
        if own := [path for path in files if lies_in(path, ("/workspace",))]:
            raise LaunchError(
                f"cannot show {own[0]}: /workspace is the cell's own",
                "move the interpreter or its environment to another directory",
            )
        if any(lies_in(path, (_SHARED_MEMORY,)) for path in (*files, *self._sources)):
            self.plan = _with_shared_memory(self.plan)
        elsewhere = lead_elsewhere(files) | certificates
        elsewhere |= {path: real for path, real in self._sources.items() if path != real}
        uid = os.geteuid() or id_for(self._user)
        for place in self._shared_files:
            if any(lies_in(bind.path, (place,)) for bind in self.plan.binds):
                raise PolicyError(
                    f"the policy shows {place}, where cells have files of the sandbox"
                )
        return Boot(
            self.plan,
            files,
            links,
            runtime.hidden,
            uid,
            self.tree.joined_by_write,
            tuple(elsewhere.items()),
            tuple(self._shared_files),
            self._cells_per_network if self.plan.reuses_network else 1,
        )

    def _certificates(self) -> dict[str, str]:
        """Return where cells are shown the host's certificate authorities, and what is shown there."""
        plan = self.plan
        if not (plan.network and plan.network.certificates):
            return {}
        if lies_in(CERTIFICATES, tuple(bind.path for bind in plan.binds)):
            return {}  # the policy shows its own
        return {CERTIFICATES: leads(plan.network.certificates)}

    def make(self, count: int = 1) -> Iterator[HeldCell]:
        """Yield `count` cells as each begins to wait for its program, or fewer if there is no room.

        Raises LaunchError, LauncherLost.
        """
        cells = self._new_cells(count)
        ready = 0
        try:
            self.launcher.fork(cells)
            for cell in cells:
                held = HeldCell(cell, self)
                held.prepare()
                ready += 1
                yield held
        finally:
            self._discard(cells[ready:])

    def _new_cells(self, count: int) -> list[Cell]:
        """Return what will be cells once the launcher has made them, `count` or fewer."""
        with self._lock:
            if self._retired:
                raise LauncherLost(cell_began=False)
            self._living += count
            self.forks += count
        cells: list[Cell] = []
        try:
            for _ in range(count):
                cells.append(self._new_cell())  # noqa: PERF401 - to be discarded
        except BaseException as error:
            for _ in range(count - len(cells)):
                self.free(None)
            if not cells or not isinstance(error, CellwrightError):
                self._discard(cells)
                raise
        return cells

    def _discard(self, cells: list[Cell]) -> None:
        with contextlib.ExitStack() as rest:  # all, even if one cannot be killed
            for cell in cells:
                rest.callback(self.free, cell)
                rest.callback(cell.kill)

    def is_alive(self) -> bool:
        """Tell whether the launcher is there."""
        return not self._lost and self.launcher.is_alive()

    def is_current(self) -> bool:
        """Tell whether the launcher is there, was not replaced, and what it shows of directories that
        hold denied names is what is in them now."""
        if self._replaced or not self.is_alive():
            return False
        return self._covers is None or self._covers.is_current()

    def uncovered(self) -> str:
        """Return a path that the policy hides and cells can see by now; empty if there is none."""
        return self._covers.uncovered() if self._covers else ""

    @property
    def listens(self) -> bool:
        return bool(self.plan.refusals)

    def lose(self) -> None:
        """Note that the launcher died: its keeper may take a moment to follow."""
        self._lost = True

    def give_up(self) -> None:
        """End a launcher that does not answer, and with it every cell: it is stopped, or stuck."""
        self.lose()
        self.launcher.kill()

    def listen(self, descriptor: int) -> Listener:
        """Return the listener of a cell, now that its descriptor has come."""
        if self._lessons is None:
            return Listener(descriptor, self.plan, self._shown, self._policy.limits.violations)
        from .watching.learner import Learner

        least = msgspec.structs.replace(
            self.boot, plan=msgspec.structs.replace(self.plan, binds=())
        )
        return Learner(descriptor, self.plan, Shown(least), self._lessons)

    def network_of(self, guest: int) -> "CellNetwork | None":
        """Return the network of the cell of `guest`, a pidfd; None if the policy has no loopback."""
        if not self.plan.loopback:
            return None
        from .cell_network import CellNetwork  # seldom needed

        return CellNetwork(self.launcher, guest)

    def connect(self, sockets: list[int]) -> CellEgress | None:
        """Have the egress process serve a cell that has `sockets`; None if cells have no way out."""
        if self._egress is None or self.plan.network is None:
            if sockets or self.plan.network:
                raise InternalError("a cell has a way out, but there is no egress process")
            return None
        return self._egress.add(self.plan, sockets)

    def free(self, cell: Cell | None) -> None:
        """Free what a cell held that is gone, or that never came to be."""
        with self._lock:  # first: what follows may fail where memory is short
            self._living -= 1
            if cell:
                self._leftovers.append(cell.cgroup)
        try:
            if cell:
                cell.close()
        finally:
            self._sweep()

    def replace(self) -> None:
        """`retire`, and lend none of the cells that wait: those of another launcher are better."""
        self._replaced = True
        self.retire()

    def retire(self) -> None:
        """Make no more cells, and end the launcher when those that live are gone."""
        with self._lock:
            self._retired = True
        self._sweep()

    def close(self) -> None:
        """End the launcher, and so every cell."""
        with self._lock:
            self._retired = True
        self.launcher.close()
        self.tree.close()  # a thread may still hold a cell, but nothing of it runs
        self._sweep()

    def _new_cell(self) -> Cell:
        try:
            cgroup = self._create_cgroup()
        except OSError as error:
            if not self.is_alive():  # systemd takes a scope away with its last process
                raise LauncherLost(cell_began=False) from None
            raise LaunchError(f"cannot make {error.filename}: {error.strerror}") from None
        try:
            return Cell(cgroup, self.plan.socket_bytes)
        except BaseException as error:
            cgroup.close_descriptors()
            cgroup.remove()  # nothing was ever in it
            if isinstance(error, OSError):
                raise LaunchError(f"no descriptors for a cell: {error.strerror}") from None
            raise

    def _create_cgroup(self) -> Cgroup:
        plan = self.plan
        caps = Caps(plan.memory_bytes, plan.cpus, plan.processes, plan.socket_bytes)
        return self.tree.create(f"cell-{next(self._names)}", caps)

    def _sweep(self) -> None:
        """Remove cgroups, now or when what was killed in them has died; all, once it is the last."""
        with self._lock:
            self._remove_leftovers()
            last = self._retired and not self._living
        if last:
            self._take_down()

    def _take_down(self) -> None:
        self.launcher.close()
        with self._lock:
            self._remove_leftovers()  # where the launcher died first, what was in them did so now
        self.tree.close()
        if self._record:
            self._record.remove()
        for files, directory in self._shared():
            files.detach(directory)

        if self._covers:
            self._covers.close()

    def _remove_leftovers(self) -> None:
        self._leftovers = [each for each in self._leftovers if not each.remove()]


def _with_shared_memory(plan: Plan) -> Plan:
    """Give cells a /dev/shm of their own in place of a link to /tmp, beneath which host paths are shown
    (shm_overview(7))."""
    (temporary,) = (each for each in plan.tmpfs if each.target == "/tmp")  # noqa: S108
    memory = msgspec.structs.replace(temporary, target=_SHARED_MEMORY)
    rule = PathRule(path=_SHARED_MEMORY, write=True, execute=memory.executable)
    return msgspec.structs.replace(
        plan, tmpfs=(*plan.tmpfs, memory), path_rules=(*plan.path_rules, rule)
    )

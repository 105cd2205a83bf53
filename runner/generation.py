"""One launcher, its cgroups, and the cells that are forked from it."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from ..policies.errors import CellwrightError, InternalError, LauncherLost, LaunchError
from ..policies.languages import PYTHON
from ..policies.policy import Policy
from .cells import Cell
from .cgroups import Cgroup
from .cgroups.tree import Caps
from .held_cell import HeldCell
from .launch import LaunchArguments, launch_of
from .living import KeptRecord, keep_record
from .shared_files import SharedFiles
from .spawn import Spawned
from .watching.listener import Listener
from .watching.shown import Shown

if TYPE_CHECKING:
    from ..policies.learning import Lessons
    from .cell_network import CellNetwork
    from .covers import Covers
    from .egress_process import CellEgress, EgressProcess

NO_FILES: Mapping[str, SharedFiles] = MappingProxyType({})
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the cell's own


class Generation:
    """Makes cells until it is retired; is gone when the last of them is."""

    def __init__(
        self, policy: Policy, spawned: Spawned, cgroup_root: str | None,
        lessons: "Lessons | None" = None, language: str = PYTHON, interpreter: str = "",
        shared_files: Mapping[str, SharedFiles] = NO_FILES, sources: Mapping[str, str] | None = None,
        user: int | str | None = None, egress: "EgressProcess | None" = None,
        cells_per_network: int = 1, is_for_one_cell: bool = False,
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
        self._egress = egress
        self._shared_directories: tuple[int, ...] = ()  # where what cells see is written
        self._covers: Covers | None = None  # of what the policy hides
        self._names = itertools.count()
        self.id = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._leftovers: list[Cgroup] = []  # what was busy when it should have gone
        self._living = 0
        self._retired = self._lost = self._replaced = False
        self._record: KeptRecord | None = None
        self.forks = 0  # how many cells were asked of it
        sources = spawned.sources_of(policy) if sources is None else dict(sources)
        launch = launch_of(
            spawned,
            LaunchArguments(
                policy, sources, cgroup_root, lessons is not None, language, interpreter,
                tuple(shared_files), user, cells_per_network,
                is_for_one_cell,
            ),
        )  # fmt: skip
        self.launcher, self.tree = launch.launcher, launch.tree
        self.plan, self.boot = launch.plan, launch.boot
        try:
            self._shown = Shown(self.boot)
            self._shared_directories, self._covers = launch.finish()
            if self._covers:
                self._covers.watch(self.plan, sources)
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

    def make(self, count: int = 1) -> Iterator[HeldCell]:
        """Yield `count` cells as each begins to wait for its program, or fewer if there is no room.

        Raises LaunchError, LauncherLost.
        """
        yield from self._make(self._new_cells(count))

    def keep(self) -> None:
        """Keep the launcher, even if it is retired, until `free`."""
        with self._lock:
            self._living += 1

    def make_kept(self) -> HeldCell:
        """Return a new cell, though the launcher may be retired; raises LaunchError, LauncherLost."""
        (held,) = self._make(self._new_cells(1, is_kept=True))
        return held

    def _make(self, cells: list[Cell]) -> Iterator[HeldCell]:
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

    def _new_cells(self, count: int, *, is_kept: bool = False) -> list[Cell]:
        """Return what will be cells once the launcher has made them, `count` or fewer."""
        with self._lock:
            if self._retired and not is_kept:
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

    def listen(self, descriptor: int, cgroup: Cgroup) -> Listener:
        """Return the listener of a cell, now that its descriptor has come."""
        if self._lessons is None:
            limit = self._policy.limits.violations
            return Listener(descriptor, self.plan, self._shown, limit, cgroup)
        from .watching.learner import Learner

        least = msgspec.structs.replace(
            self.boot, plan=msgspec.structs.replace(self.plan, binds=())
        )
        return Learner(descriptor, self.plan, Shown(least), self._lessons, cgroup)

    def network_of(self, guest: int) -> "CellNetwork | None":
        """Return the network of the cell of `guest`, a pidfd; None if the policy has no loopback."""
        if not self.plan.loopback:
            return None
        from .cell_network import CellNetwork  # seldom needed

        return CellNetwork(self.launcher, guest)

    def connect(self, sockets: list[int]) -> "CellEgress | None":
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

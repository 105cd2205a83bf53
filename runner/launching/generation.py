"""One launcher, its cgroups, and the cells that are forked from it."""

import _socket
import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import CellwrightError, InternalError, LauncherLost, LaunchError
from .. import channel
from ..cells.cell import Cell
from ..cgroups import Cgroup
from ..cgroups.cell_cgroups import CellCgroups
from ..cgroups.cgroup_tree import Caps, open_joins
from ..listening.cell_listener import Listener
from ..listening.shown import Shown
from ..shared_files import SharedFiles
from .launch import LaunchArguments, launch_of
from .living import KeptRecord, keep_record
from .spawn import Spawned

if TYPE_CHECKING:
    from ..cells.cell_network import CellNetwork
    from ..confined.egress_process import CellEgress
    from .covers import Covers


class Generation:
    """Makes cells until it is retired; is gone when the last of them is."""

    def __init__(self, spawned: Spawned, arguments: LaunchArguments) -> None:
        """Have the launcher that was `spawned` ready.

        Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError if the launcher
        cannot be set up.
        """
        self._arguments = arguments
        self._shared_directories: tuple[int, ...] = ()  # writable; cells see them read-only
        self._covers: Covers | None = None  # covers over paths that the policy hides
        self._guards = -1  # the socket on which guards of cells are asked for
        self.id = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._living = 0
        self._retired = self._lost = self._replaced = False
        self._record: KeptRecord | None = None
        self.forks = 0  # how many cells it was asked for
        launch = launch_of(spawned, arguments)
        self.launcher, self.tree = launch.launcher, launch.tree
        self.plan, self.boot = launch.plan, launch.boot
        plan = self.plan
        caps = Caps(plan.memory_bytes, plan.cpus, plan.processes, plan.socket_bytes)
        self._cgroups = CellCgroups(self.tree, caps, arguments.cells_per_cgroup)
        try:
            self._shown = Shown(self.boot)
            self._shared_directories, self._covers, self._guards = launch.finish()
            if self._covers:
                self._covers.watch(self.plan, arguments.sources)
            for files, directory in self._shared():
                files.attach(directory)
            self._record = keep_record(
                "sandbox", self.launcher.keeper, arguments.policy.name, arguments.language,
                self.tree.places, control=arguments.egress.control if arguments.egress else "",
            )  # fmt: skip
        except BaseException as error:
            self._take_down()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot set up: {error}") from None
            raise

    def _shared(self) -> Iterator[tuple[SharedFiles, int]]:
        return zip(self._arguments.shared_files.values(), self._shared_directories, strict=False)

    def keep(self) -> None:
        """Keep the launcher, even if it is retired, until `free`."""
        with self._lock:
            self._living += 1

    def fork(self, count: int, *, is_kept: bool = False) -> list[Cell]:
        """Have the launcher make `count` cells, or fewer if there is no room; each is ready when its
        status channel says so.

        Raises LaunchError, and LauncherLost if the launcher died, or is retired and not kept.
        """
        cells = self._new_cells(count, is_kept=is_kept)
        try:
            self.launcher.fork(cells)
        except BaseException:
            self.discard(cells)
            raise
        return cells

    def _new_cells(self, count: int, *, is_kept: bool) -> list[Cell]:
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
                self.discard(cells)
                raise
        return cells

    def discard(self, cells: list[Cell]) -> None:
        """Kill and free cells that are not ready, and never will be."""
        with contextlib.ExitStack() as rest:  # closes all, even if one cannot be killed
            for cell in cells:
                rest.callback(self.free, cell)
                rest.callback(cell.kill)

    def is_alive(self) -> bool:
        """Tell whether the launcher is there."""
        return not self._lost and self.launcher.is_alive()

    def is_current(self) -> bool:
        """Tell whether the launcher lives, was not replaced, and shows the current content of
        directories that hold denied names."""
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

    def listen(self, descriptor: int, guest: int, cgroup: Cgroup) -> Listener:
        """Return the listener of the cell of `guest`, a pidfd, now that its descriptor has come."""
        open_guard = partial(self._open_guard, guest, cgroup) if self._guards >= 0 else None
        if self._arguments.lessons is None:
            limit = self._arguments.policy.limits.violations
            return Listener(descriptor, self.plan, self._shown, limit, cgroup, open_guard)
        from ..listening.learner import Learner

        least = msgspec.structs.replace(
            self.boot, plan=msgspec.structs.replace(self.plan, binds=())
        )
        lessons = self._arguments.lessons
        return Learner(descriptor, self.plan, Shown(least), lessons, cgroup, open_guard)

    def _open_guard(self, guest: int, cgroup: Cgroup) -> "_socket.socket":
        """Have a guard begin in a cell and its cgroup; return the socket that it answers on."""
        cgroup.retire()  # the guard may join it later than the cell ends
        ours, theirs = channel.pair()
        joined = open_joins(cgroup.places.values())
        try:
            with self._lock:
                makers = _socket.socket(fileno=os.dup(self._guards))
                channel.send_packet(makers, b"\0g", (guest, theirs.fileno(), *joined))
                makers.close()
        finally:
            theirs.close()
            for each in joined:
                os.close(each)
        return ours

    def network_of(self, guest: int) -> "CellNetwork | None":
        """Return the network of the cell of `guest`, a pidfd; None if the policy has no loopback."""
        if not self.plan.loopback:
            return None
        from ..cells.cell_network import CellNetwork  # seldom needed

        return CellNetwork(self.launcher, guest)

    def connect(self, sockets: list[int]) -> "CellEgress | None":
        """Have the egress process serve a cell that has `sockets`; None if cells have no way out."""
        egress = self._arguments.egress
        if egress is None or self.plan.network is None:
            if sockets or self.plan.network:
                raise InternalError("a cell has a way out, but there is no egress process")
            return None
        return egress.add(self.plan, sockets)

    def free(self, cell: Cell | None) -> None:
        """Free the resources of a cell that is gone, or could not be made."""
        with self._lock:  # each step, because one may fail if memory is short
            self._living -= 1
        try:
            if cell:
                cell.close()
        finally:
            try:
                if cell:
                    self._cgroups.take_back(cell.cgroup)
            finally:
                self._sweep()

    def settle(self) -> None:
        """Remove the cgroups that no cell has."""
        self._cgroups.sweep(idle=True)

    def replace(self) -> None:
        """`retire`, and lend none of the cells that wait: those of another launcher are better."""
        self._replaced = True
        self.retire()

    def retire(self) -> None:
        """Make no more cells, and end the launcher when the living ones are gone."""
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
            cgroup = self._cgroups.lend()
        except OSError as error:
            if not self.is_alive():  # systemd removes a scope with its last process
                raise LauncherLost(cell_began=False) from None
            raise LaunchError(f"cannot make {error.filename}: {error.strerror}") from None
        try:
            return Cell(cgroup, self.plan.socket_bytes)
        except BaseException as error:
            cgroup.close_descriptors()
            self._cgroups.take_back(cgroup)
            if isinstance(error, OSError):
                raise LaunchError(f"no descriptors for a cell: {error.strerror}") from None
            raise

    def _sweep(self) -> None:
        """Remove cgroups, now or when killed processes in them have died. The last call removes all."""
        self._cgroups.sweep()
        with self._lock:
            last = self._retired and not self._living
        if last:
            self._take_down()

    def _take_down(self) -> None:
        self.launcher.close()
        self._cgroups.close()  # if the launcher died first, processes in them have died by now
        self.tree.close()
        if self._record:
            self._record.remove()
        for files, directory in self._shared():
            files.detach(directory)

        if self._covers:
            self._covers.close()
        guards, self._guards = self._guards, -1
        if guards >= 0:
            os.close(guards)

"""The cgroups of one launcher's cells: made, lent to one cell after the other, removed.

Making and removing a cgroup takes 0.25 to 0.4 ms, and all processors of a host take turns at it; making
a used one as new takes a twentieth of that (measured). A used one serves another cell only if nothing
can be told from it: `CountedCgroup.take_back` and `renew` have the rules. In doubt it is removed.
"""

import itertools
import threading
from collections import deque

from .cgroup_tree import Caps, Cgroup, CgroupTree

_MOST_IDLE = 8  # used ones that are kept, because each holds descriptors and memory of the kernel


class CellCgroups:
    """The cgroups of one launcher, all with the same caps.  Safe from many threads."""

    def __init__(self, tree: CgroupTree, caps: Caps, cells_each: int) -> None:
        """At most `cells_each` cells have one."""
        self._tree, self._caps, self._cells_each = tree, caps, cells_each
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._idle: deque[Cgroup] = deque()  # the longest idle first
        self._busy: list[
            Cgroup
        ] = []  # to be removed, though processes in them may not have ended yet
        self._is_closed = False

    def lend(self) -> Cgroup:
        """Return one for a new cell; raises OSError if none can be made."""
        while (used := self._take_idle()) is not None:
            if used.renew():
                return used
            self._remove(used)
        return self._tree.create(f"cell-{next(self._names)}", self._caps)

    def take_back(self, cgroup: Cgroup) -> None:
        """Take it from a cell that is gone, or was not made."""
        with self._lock:
            has_room = len(self._idle) < _MOST_IDLE and not self._is_closed
            if cgroup.take_back(self._cells_each) and has_room:
                self._idle.append(cgroup)
                return
        self._remove(cgroup)

    def sweep(self, *, idle: bool = False) -> None:
        """Remove those that were busy when they should have been removed, and those that are `idle`."""
        with self._lock:
            if idle:
                self._busy += self._idle
                self._idle.clear()
            self._busy = [each for each in self._busy if not each.remove()]

    def close(self) -> None:
        """Remove those that no cell has, and from now on each when its cell is gone."""
        with self._lock:
            self._is_closed = True
        self.sweep(idle=True)

    def _take_idle(self) -> Cgroup | None:
        with self._lock:
            return self._idle.popleft() if self._idle else None

    def _remove(self, cgroup: Cgroup) -> None:
        with self._lock:
            self._busy.append(cgroup)
        self.sweep()

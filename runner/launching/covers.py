"""`Covers`: checks, before every call, that denied paths stay hidden from a launcher's cells."""

import mmap
import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from ...policies.denied import Denied, denied_by
from ...policies.plan import Plan
from ..messages import Cover, Views, decode

_MOST_LOOKED_AT = 100_000  # entries beneath writable directories; the launcher has the same limit
_CLOCK_TICK_NS = 20_000_000  # two changes within a clock tick can have one modification time


class Covers:
    """A launcher's root, the covers in it, and the host directories that it shows entry by entry.

    A cover vanishes when its mount point is replaced or removed from outside (rename(2)).  Safe
    from many threads.
    """

    def __init__(self, root: int, memory: int) -> None:
        """Take over two descriptors: the launcher's root directory, and a memfd with `Views`."""
        self._root = root
        self._lock = threading.Lock()
        try:
            with mmap.mmap(memory, 0, access=mmap.ACCESS_READ) as content:
                self._views: Views = decode(bytes(content), Views)
        finally:
            os.close(memory)
        self._late: _LateNames | None = None

    def watch(self, plan: Plan, sources: Mapping[str, str]) -> None:
        """Look, from now on, for denied names that appear beneath writable directories.

        `sources`: shown path -> its path on the host, if that differs.
        """
        late = _LateNames(plan, sources, frozenset(each.path for each in self._views.covers))
        late.find()  # reads each directory now, so that no request waits for it
        self._late = late if late.has_directories else None

    def uncovered(self) -> str:
        """Return the first denied path without a cover: its cover is gone, or the name appeared
        later; "" if there is none."""
        with self._lock:
            if self._root < 0:
                return ""
            for each in self._views.covers:
                if not self._lies(each):
                    return each.path
            return self._late.find() if self._late else ""

    def is_current(self) -> bool:
        """Return whether every cover is there and every directory shown entry by entry is
        unchanged."""
        if self.uncovered():
            return False
        for each in self._views.snapshots:
            try:
                status = os.stat(each.path, follow_symlinks=False)
            except OSError:
                return False
            now = status.st_dev, status.st_ino, status.st_mtime_ns
            if now != (each.device, each.inode, each.changed_at_ns):
                return False
        return True

    def _lies(self, cover: Cover) -> bool:
        try:
            status = os.stat(cover.path[1:], dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (cover.device, cover.inode)

    def close(self) -> None:
        """Release the launcher's root; may be called twice."""
        with self._lock:
            root, self._root = self._root, -1
        if root >= 0:
            os.close(root)


class _Directory(NamedTuple):
    """A directory of the host beneath a writable one, as it was when its names were read."""

    path: str  # path as cells see it
    denied: Denied
    changed_at_ns: int


class _LateNames:
    """Denied names that appear, beneath writable directories, after a launcher covered the others.

    A cell sees such a name, because a writable directory is mounted whole.  A new name changes the
    modification time of its directory, so only changed directories are read again.
    """

    def __init__(self, plan: Plan, sources: Mapping[str, str], covered: frozenset[str]) -> None:
        self._covered = covered
        self._shown = frozenset(bind.path for bind in plan.binds)
        self._directories: dict[str, _Directory] = {}
        self._found = ""
        denied = denied_by(plan.hidden)
        for bind in plan.binds if denied else ():
            source = sources.get(bind.path, bind.path)
            below = _both(denied.beneath(source), denied.beneath(bind.path))
            if bind.writable and below and os.path.isdir(source):
                self._directories[source] = _Directory(bind.path, below, -1)

    @property
    def has_directories(self) -> bool:
        return bool(self._directories)

    def find(self) -> str:
        """Return the first denied path that had no cover; "" if there was none.

        It is the answer from then on: a directory that was read is not read again, and others were not.
        """
        self._found = self._found or self._look()
        return self._found

    def _look(self) -> str:
        waiting = list(self._directories.items())
        looked_at = 0
        while waiting:
            source, known = waiting.pop()
            try:
                changed_at_ns = os.stat(source, follow_symlinks=False).st_mtime_ns
                if changed_at_ns == known.changed_at_ns:
                    continue
                entries = list(os.scandir(source))
            except OSError:  # removed, or not readable to this process (to its cells neither)
                self._directories.pop(source, None)
                continue
            if time.time_ns() - changed_at_ns < _CLOCK_TICK_NS:
                changed_at_ns = -1  # a later change may leave the time as it is: read again
            self._directories[source] = known._replace(changed_at_ns=changed_at_ns)
            looked_at += len(entries)
            if looked_at > _MOST_LOOKED_AT or len(self._directories) > _MOST_LOOKED_AT:
                return f"{known.path} (more than {_MOST_LOOKED_AT} entries lie beneath it)"
            for entry in entries:
                path, below = f"{known.path}/{entry.name}", known.denied.enter(entry.name)
                if below is None and path not in self._covered:
                    return path
                is_new = entry.path not in self._directories and path not in self._shown
                if below and is_new and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, _Directory(path, below, -1)))
        return ""


def _both(one: Denied | None, other: Denied | None) -> Denied | None:
    return one.also(other) if one is not None and other is not None else None

"""`SessionFreezer`: stops the processes of a session while nothing uses it."""

import threading
from collections.abc import Callable

from .cgroups import Cgroup


class SessionFreezer:
    """Counts what uses a session beside its requests, such as connections to exposed ports; safe from
    many threads."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._lock = threading.Lock()
        self._users = 0
        self._is_shut = False
        self.is_frozen = False

    @property
    def is_in_use(self) -> bool:
        return self._users > 0

    def freeze(self) -> None:
        """Stop its processes, unless something uses it."""
        with self._lock:
            if not self._users:
                self.is_frozen = self._cgroup.freeze()

    def thaw(self) -> bool:
        """Let its processes go on; tell whether they stood still."""
        with self._lock:
            was_frozen, self.is_frozen = self.is_frozen, False
            self._cgroup.thaw()
        return was_frozen

    def begin_use(self) -> bool:
        """Count one more user; False if it takes none any more."""
        with self._lock:
            self._users += not self._is_shut
            return not self._is_shut

    def end_use(self) -> None:
        with self._lock:
            self._users -= 1

    def shut(self, is_free: Callable[[], bool]) -> bool:
        """Take no users any more, unless there are some or `is_free` says no; tell whether so."""
        with self._lock:
            self._is_shut = self._is_shut or (not self._users and is_free())
            return self._is_shut

"""`MadeTools`: the tools of a registry's file, cached until it changes, and their counts."""

import contextlib
import os
import threading

from msgspec.structs import replace

from ...policies.closing import Closing
from ...policies.errors import RegistryError
from ..schemas.spec import ToolSpec, ToolState
from .counts import UsageCounts, VersionKey
from .similarity import shape_of
from .store import Quota, ToolStore, ToolUsage


class MadeTools(Closing):
    """Versions of tools by key (tool_names.key_of).  Safe from many threads and processes.

    The methods raise RegistryError while the file is closed or damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, retired_after: int, quota: Quota,
        *, must_exist: bool = False,
    ) -> None:  # fmt: skip
        self._store = ToolStore(path, quota, must_exist=must_exist)
        self._counts = UsageCounts(self._store, retired_after)
        self._lock = threading.RLock()
        self._known: dict[tuple[str, int | None], ToolSpec] = {}
        self._latest: list[ToolSpec] | None = None
        self._changes = -1
        self._revision = 0

    def revision(self) -> int:
        """Return a number that changes with each change of the tools, also by another process."""
        with self._lock:
            self._refresh()
            return self._revision

    def get(self, key: str, version: int | None) -> ToolSpec | None:
        """Return a version of a tool, by default the latest; None if it does not exist."""
        with self._lock:
            self._refresh()
            if (found := self._known.get((key, version))) is None:
                found = self._store.get(key, version)
                if found:
                    self._known[key, version] = found
            return found

    def latest(self) -> list[ToolSpec]:
        """Return the latest version of every tool."""
        with self._lock:
            self._refresh()
            if self._latest is None:
                self._latest = self._store.latest()
            return self._latest

    def versions(self, key: str) -> list[ToolSpec]:
        """Return every version of a tool, the oldest first."""
        return self._store.versions(key)

    def of_shape(self, shape: str, most: int) -> list[ToolSpec]:
        """Return at most `most` latest versions with parameters of a shape (similarity.py)."""
        return self._store.of_shape(shape, most)

    # changing

    def add(self, key: str, spec: ToolSpec, *, is_new: bool) -> ToolSpec:
        """Store a tool as the next version of its name, and return that version.

        Raises ToolExists if another maker has the name, or with `is_new` a tool that is not retired,
        and ToolQuotaExceeded.
        """
        with self._lock:
            self._clear()
            return self._store.add(
                key, shape_of(spec.parameters), spec, lambda version: replace(spec, version=version),
                is_new=is_new,
            )  # fmt: skip

    def remove(self, key: str) -> None:
        """Remove a tool and all its versions."""
        with self._lock:
            self._clear()
            self._store.remove(key)

    def set_state(self, key: str, version: int, state: ToolState) -> None:
        """Set the state of a version, and reset its failures in a row."""
        with self._lock:
            self._clear()
            self._store.set_state(key, version, state)

    # counting

    def note(self, counted: VersionKey, *, well: bool, may_retire: bool = True) -> None:
        """Count a call, which failed unless `well`; retire a version that fails too often."""
        with self._lock:
            if self._counts.note(counted, well=well, may_retire=may_retire):
                self._clear()

    def usage(self, counted: VersionKey) -> ToolUsage:
        """Return how often a version was called and failed."""
        with self._lock:
            return self._counts.usage(counted)

    def flush(self) -> None:
        """Write all counts now."""
        with self._lock:
            if self._counts.write_all():
                self._clear()

    def close(self) -> None:
        """Write the counts if possible, and close the file; closing twice is fine."""
        with self._lock:
            with contextlib.suppress(RegistryError):
                self.flush()
            self._store.close()

    # the cache

    def _refresh(self) -> None:
        """Clear the cache if another process has written."""
        changes = self._store.changes()
        if changes != self._changes:
            self._clear()
            self._changes = changes

    def _clear(self) -> None:
        self._revision += 1
        self._known.clear()
        self._latest = None

"""`UsageCounts`: the calls and failures of made tools, written to the store in batches."""

import contextlib

from ...policies.errors import RegistryError
from .store import ToolStore, ToolUsage

_WRITTEN_AFTER = 256  # successful uses; each write waits for the disk
VersionKey = tuple[str, int]  # the key of a name (tool_names.key_of), and a version


class _UnwrittenCounts:
    """The calls of one version since its counts were last written."""

    def __init__(self) -> None:
        self.uses = self.failures = self.in_a_row = 0
        self.well = False

    def add(self, *, well: bool, may_retire: bool) -> None:
        self.uses += 1
        self.failures += not well
        if may_retire:
            self.in_a_row = 0 if well else self.in_a_row + 1
            self.well |= well

    @property
    def usage(self) -> ToolUsage:
        return ToolUsage(self.uses, self.failures, self.in_a_row)


class UsageCounts:
    """Counts of one store.  It writes failures at once, uses after 256; the caller holds the lock."""

    def __init__(self, store: ToolStore, retired_after: int) -> None:
        self._store = store
        self._retired_after = retired_after
        self._unwritten: dict[VersionKey, _UnwrittenCounts] = {}
        self._failing: set[VersionKey] = set()  # versions whose last call failed

    def note(self, key: VersionKey, *, well: bool, may_retire: bool = True) -> bool:
        """Count a call, which failed unless `well`; tell whether it retired the version.

        Only a call with `may_retire` retires it.  Counts that cannot be written now are written with
        the next call.
        """
        count = self._unwritten.setdefault(key, _UnwrittenCounts())
        count.add(well=well, may_retire=may_retire)
        if not well or count.uses >= _WRITTEN_AFTER or key in self._failing:
            with contextlib.suppress(RegistryError):
                return self._write(key)
        return False

    def write_all(self) -> bool:
        """Write all counts; tell whether that retired a version.  Raises RegistryError."""
        retired = [self._write(key) for key in list(self._unwritten)]
        return any(retired)

    def usage(self, key: VersionKey) -> ToolUsage:
        """Return the written counts, and add the uses that are not written yet."""
        known = self._store.usage(*key)
        return known._replace(uses=known.uses + self._unwritten.get(key, _UnwrittenCounts()).uses)

    def _write(self, key: VersionKey) -> bool:
        count = self._unwritten[key]
        retired = self._store.count(
            *key, count.usage, well=count.well, retire_at=self._retired_after
        )
        del self._unwritten[key]
        if count.in_a_row:
            self._failing.add(key)
        else:
            self._failing.discard(key)
        return retired

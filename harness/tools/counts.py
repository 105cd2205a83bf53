"""How often versions of made tools were called, and failed: what is written now, and what later."""

import contextlib

from ...policies.errors import RegistryError
from .store import ToolStore, ToolUsage

_WRITTEN_AFTER = 256  # uses that went well: each write waits for the disk
VersionKey = tuple[str, int]  # the key of a name, and a version


class _UnwrittenCounts:
    """Calls of one version since its counts were written."""

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
    """Those of one store.  Failures are written at once, uses after 256; the caller has the lock."""

    def __init__(self, store: ToolStore, retired_after: int) -> None:
        self._store = store
        self._retired_after = retired_after
        self._unwritten: dict[VersionKey, _UnwrittenCounts] = {}
        self._failing: set[VersionKey] = set()  # whose last call failed

    def note(self, counted: VersionKey, *, well: bool, may_retire: bool = True) -> bool:
        """Count a call; tell whether the version was retired by that, which only one that
        `may_retire` does.

        What cannot be written now is written with the next.
        """
        count = self._unwritten.setdefault(counted, _UnwrittenCounts())
        count.add(well=well, may_retire=may_retire)
        if not well or count.uses >= _WRITTEN_AFTER or counted in self._failing:
            with contextlib.suppress(RegistryError):
                return self._write(counted)
        return False

    def write_all(self) -> bool:
        """Write all counts; tell whether a version was retired by that.  Raises RegistryError."""
        retired = [self._write(counted) for counted in list(self._unwritten)]
        return any(retired)

    def usage(self, counted: VersionKey) -> ToolUsage:
        """Return what was written and, of uses, what was not yet."""
        known = self._store.usage(*counted)
        return known._replace(
            uses=known.uses + self._unwritten.get(counted, _UnwrittenCounts()).uses
        )

    def _write(self, counted: VersionKey) -> bool:
        count = self._unwritten[counted]
        retired = self._store.count(
            *counted, count.usage, well=count.well, retire_at=self._retired_after
        )
        del self._unwritten[counted]
        if count.in_a_row:
            self._failing.add(counted)
        else:
            self._failing.discard(counted)
        return retired

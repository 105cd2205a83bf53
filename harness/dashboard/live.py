"""`LiveTimeline`: the records of a log as they are written, for a page that is looked at meanwhile."""

import threading

from ...runner.audit.record import AuditEntry
from .overview import Overview
from .timeline import Timeline

_MOST_RUNS = 200
_MOST_EVENTS = 100
_MOST_EARLY = 1000


class LiveTimeline:
    """A Timeline for `AuditLog(on_entry=...)`, which calls it from many threads.

    Two threads may be told of their records in the wrong order, so a record waits for those before it.
    """

    def __init__(self) -> None:
        self._timeline = Timeline(_MOST_RUNS, _MOST_EVENTS)
        self._lock = threading.Lock()
        self._early: dict[int, AuditEntry] = {}
        self._next = 0  # the number of the next record; 0 before the first

    def add(self, entry: AuditEntry) -> None:
        """Take a record.  One that could not be written has no number, and takes no turn."""
        with self._lock:
            if not entry.seq:
                self._timeline.add(entry)
                return
            self._next = self._next or entry.seq
            self._early[entry.seq] = entry
            if len(self._early) > _MOST_EARLY:  # one is missing
                self._next = min(self._early)
            while found := self._early.pop(self._next, None):
                self._timeline.add(found)
                self._next += 1

    def fill(self, overview: Overview) -> None:
        """Put the records so far into an overview."""
        with self._lock:
            self._timeline.fill(overview)

"""`AuditLog`: events in, a bounded memory of them and an append-only file out."""

import collections
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...policies.errors import AuditError
from .file import AuditFile, Durability, StaleFile
from .level import AuditLevel
from .record import AuditEntry, line_of, plain, plain_details
from .spans import Span
from .verification import Link, read

OnEntry = Callable[[AuditEntry], None]
_MIB = 1024 * 1024


class AuditLog:
    """Remembers the last `max_entries` events and, with `path`, appends every one to a file.

    `on_entry` is called with each.  `level` is the least that is kept.  With `required`, what cannot
    be written raises AuditError, so that nothing runs unrecorded; without, it is counted and said in
    the result, and recorded as a gap once writing works again.  `durability`: "none" leaves flushing
    to the kernel, "batched" flushes every 256 records or every second that has one, "every" each.
    `key` makes the chain one that only its holder can continue or rewrite.  A file that grows past
    `rotate_bytes` is put aside under a number.  Safe from many threads; one process at a time.
    """

    def __init__(
        self,
        max_entries: int = 10_000,
        on_entry: OnEntry | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        level: AuditLevel = AuditLevel.DEBUG,
        required: bool = True,
        durability: Durability = "none",
        key: bytes | None = None,
        rotate_bytes: int = 64 * _MIB,
    ) -> None:
        """Open the trail; raises AuditError if it cannot be had, whether required or not."""
        self._entries: collections.deque[AuditEntry] = collections.deque(maxlen=max_entries)
        self._on_entry = on_entry
        self._path = None if path is None else Path(path)
        self._level = level
        self._required = required
        self._durability = durability
        self._key = key
        self._rotate_bytes = rotate_bytes
        self._lock = threading.RLock()
        self._lost = 0
        self._seq = 0
        self._file: AuditFile | None = None
        if self._path:
            self._open(self._path)

    @property
    def head(self) -> tuple[int, str]:
        """The last record's number and hash: kept elsewhere, it shows whether a tail was cut."""
        with self._lock:
            link = self._file.link if self._file else Link(self._seq, b"")
        return link.seq, link.hash.decode()

    def record(
        self,
        category: str,
        action: str,
        *,
        target: str = "",
        allowed: bool = True,
        level: AuditLevel = AuditLevel.INFO,
        sandbox_id: str = "",
        span: Span | None = None,
        **details: Any,
    ) -> bool:
        """Append one event; tell whether it was kept.  Raises AuditError in a required log."""
        if level < self._level:
            return True
        span = span or Span()
        fields: dict[str, Any] = {
            "time": time.time(), "monotonic": time.monotonic(), "level": level,
            "category": category, "action": action, "target": plain(target), "allowed": allowed,
            "sandbox_id": sandbox_id, "trace_id": plain(span.trace_id, 128), "span_id": span.span_id,
            "parent_id": span.parent_id, "details": plain_details(details),
        }  # fmt: skip
        with self._lock:
            entry = self._append(fields)
            kept = entry is not None
            entry = entry or AuditEntry(seq=self._seq + 1, **fields)
            self._remember(entry)
        if self._on_entry:
            self._on_entry(entry)
        return kept

    def get_entries(
        self,
        level: AuditLevel | None = None,
        category: str | None = None,
        sandbox_id: str | None = None,
        limit: int | None = None,
    ) -> list[AuditEntry]:
        """Return the remembered entries of at least `level`, oldest first; the last `limit`."""
        with self._lock:
            found = [
                entry
                for entry in self._entries
                if (level is None or entry.level >= level)
                and category in (None, entry.category)
                and sandbox_id in (None, entry.sandbox_id)
            ]
        return found if limit is None else found[-limit:] if limit else []

    def get_denied_actions(self, sandbox_id: str | None = None) -> list[AuditEntry]:
        """Return what was refused."""
        return [entry for entry in self.get_entries(sandbox_id=sandbox_id) if not entry.allowed]

    def get_summary(self) -> dict[str, Any]:
        """Return counts of the remembered entries."""
        with self._lock:
            return summary_of(list(self._entries))

    def export_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the remembered entries, one JSON object a line, to a new file."""
        with open(path, "xb") as file:
            for entry in self.get_entries():
                file.write(msgspec.json.encode(entry) + b"\n")

    def clear(self) -> None:
        """Forget the remembered entries; a file keeps all."""
        with self._lock:
            self._entries.clear()

    def require_writable(self) -> None:
        """Raise AuditError if the last record could not be written and still cannot."""
        with self._lock:
            if self._lost and self._required:
                self.record("log", "resume")

    def close(self) -> None:
        with self._lock:
            self._close_file()
            self._path = None

    def __enter__(self) -> "AuditLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remember(self, entry: AuditEntry) -> None:
        self._seq = entry.seq
        self._entries.append(entry)

    # the file

    def _append(self, fields: dict[str, Any]) -> AuditEntry | None:
        """Write an event; None if that failed and the log may do without."""
        if self._path is None:
            return AuditEntry(seq=self._seq + 1, **fields)
        try:
            return self._append_to(self._path, fields)
        except (OSError, AuditError) as error:
            self._lost += 1
            if self._required:
                hint = "make room or give another path; AuditLog(required=False) goes on without"
                raise AuditError(
                    f"cannot write the audit trail {self._path}: {error}", hint
                ) from None
            return None

    def _append_to(self, path: Path, fields: dict[str, Any]) -> AuditEntry:
        if self._file is None:
            self._open(path)
        elif self._file.size > self._rotate_bytes:
            self._file = self._file.rotate()
        if self._lost:
            self._put_event("gap", records_lost=self._lost)
            self._lost = 0
        try:
            return self._put(fields)
        except StaleFile:
            self._close_file()
            self._open(path)
            self._put_event("replaced")
            return self._put(fields)

    def _open(self, path: Path) -> None:
        self._file = AuditFile(path, self._key, self._durability)
        self._seq = self._file.link.seq
        if repair := self._file.repair:
            self._put_event("recovery", **repair._asdict())

    def _put(self, fields: dict[str, Any]) -> AuditEntry:
        file = self._file
        if file is None:
            raise AuditError("the trail is closed")
        entry = AuditEntry(seq=file.link.seq + 1, **fields)
        line, own = line_of(entry, file.link.hash, self._key)
        file.append(line, Link(entry.seq, own))
        return entry

    def _put_event(self, action: str, **details: Any) -> None:
        """Write something about the trail itself."""
        now = {"time": time.time(), "monotonic": time.monotonic(), "level": AuditLevel.ERROR}
        entry = self._put({**now, "category": "log", "action": action, "details": details})
        self._remember(entry)

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def summary_of(entries: list[AuditEntry]) -> dict[str, Any]:
    """Return how many entries there are, of which category and level, and how many were refused."""
    return {
        "total_entries": len(entries),
        "allowed": sum(entry.allowed for entry in entries),
        "denied": sum(not entry.allowed for entry in entries),
        "by_level": dict(collections.Counter(entry.level.name for entry in entries)),
        "by_category": dict(collections.Counter(entry.category for entry in entries)),
        "by_action": dict(collections.Counter(f"{e.category}.{e.action}" for e in entries)),
    }


def summary_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the same of a trail on disk."""
    return summary_of(list(read(path)))

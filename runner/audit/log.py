"""`AuditLog`: takes events, keeps a bounded number in memory, and appends them to a file."""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from ...policies.closing import Closing
from ...policies.errors import AuditError, PolicyError
from ..settings import AuditLevel
from .file import AuditFile, Durability, StaleFile, end_of_rotated, unfinished
from .record import (
    NAME_LIMIT,
    AuditEntry,
    FormedRecord,
    RecordForm,
    Span,
    line_of,
    plain,
    plain_details,
)
from .verification import Link, summary_of

OnEntry = Callable[[AuditEntry], None]
_MIB = 1024 * 1024
_FILE_RULES = ("mount_ns:", "landlock:")  # the layers that refuse files
_NO_SPAN = Span()


class AuditLog(Closing):
    """Keeps the last `max_entries` events and, with `path`, appends every event to a file.

    `on_entry` is called with each event; its exceptions reach the caller.  Events below `level` are
    dropped.  With `required`, an event that cannot be written raises AuditError, so that nothing
    runs unrecorded; without it, the event is counted, reported in the result, and recorded as a gap
    once writing works again.  `durability`: "none" leaves flushing to the kernel, "batched" flushes
    every 256 records and every second that has one, "every" flushes each record.  With `key`, only
    a holder of the key can continue or rewrite the chain.  A file that grows past `rotate_bytes` is
    put aside under a number.  Safe from many threads; one process writes at a time, and no forked
    child of it.
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
        """Open the trail; raises AuditError if that fails, whether required or not."""
        if durability not in get_args(Durability):
            known = ", ".join(get_args(Durability))
            raise PolicyError(f"durability: must be one of {known}, got {durability!r}")
        if not isinstance(max_entries, int) or max_entries < 0:
            raise PolicyError(
                f"max_entries: must be a whole number from 0, got {max_entries!r}",
                "AuditLog(path=...) writes to a file",
            )
        if key is not None and (not isinstance(key, bytes) or not key):
            raise PolicyError("key: must be bytes, and not empty")
        self._entries: collections.deque[AuditEntry | FormedRecord] = collections.deque(
            maxlen=max_entries
        )
        self._undelivered: collections.deque[AuditEntry] = collections.deque()
        self._on_entry = on_entry
        self._level = level
        self._required = required
        self._lock = threading.RLock()
        self._closed = False
        self._seq = 0
        self._trail: Trail | None = None
        self._is_in_memory = path is None and on_entry is None
        if path is not None:
            self._trail = Trail(Path(path), key, durability, rotate_bytes, self._remember)

    @property
    def head(self) -> tuple[int, str]:
        """The last record's number and hash; saved elsewhere, it reveals a cut tail."""
        with self._lock:
            if self._trail is None:
                return self._seq, ""
            return self._trail.link.seq, self._trail.link.hash.decode()

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
        owed: bool = False,
        **details: Any,
    ) -> bool:
        """Append one event; return whether it was kept.  Raises AuditError in a required log.

        With `owed`, for the end of something begun, it never raises: an event that cannot be
        written now is written before the next record, and until then the answer is False.
        """
        if level < self._level:
            return True
        span = span or _NO_SPAN
        trace_id, span_id, parent_id = span.trace_id, span.span_id, span.parent_id
        names = (category, action, sandbox_id, trace_id, span_id, parent_id)
        words = "".join((*names, target))
        if len(words) > NAME_LIMIT or not words.isascii() or not words.isprintable():
            category, action, sandbox_id, trace_id, span_id, parent_id = (
                plain(name, NAME_LIMIT) for name in names
            )
            target = plain(target)
        now, monotonic = time.time(), time.monotonic()
        details = plain_details(details) if details else details
        if self._is_in_memory:  # takes half of the time of the general case below
            with self._lock:
                self._seq += 1
                entry = AuditEntry(
                    seq=self._seq, time=now, monotonic=monotonic, level=level, category=category,
                    action=action, target=target, allowed=allowed, sandbox_id=sandbox_id,
                    trace_id=trace_id, span_id=span_id, parent_id=parent_id, details=details,
                )  # fmt: skip
                self._entries.append(entry)
            return True
        fields: dict[str, Any] = {
            "time": now, "monotonic": monotonic, "level": level,
            "category": category, "action": action, "target": target, "allowed": allowed,
            "sandbox_id": sandbox_id, "trace_id": trace_id, "span_id": span_id,
            "parent_id": parent_id, "details": details,
        }  # fmt: skip
        with self._lock:
            kept = self._put(fields, owed)
        if self._on_entry:
            self._tell(self._on_entry)
        return kept

    def record_formed(self, form: RecordForm, span: Span, values: tuple[str | int, ...]) -> bool:
        """Append one event of a form; `values` are its details, each a number or a short text.

        It does what `record` does; a log in memory leaves the work to the reader, since each call of a
        tool waits for two of these records.
        """
        if not self._is_in_memory:
            details: dict[str, Any] = dict(zip(form.names, values, strict=True))
            return self.record(form.category, form.action, target=form.target, span=span, **details)
        if self._level <= AuditLevel.INFO:
            now, monotonic = time.time(), time.monotonic()
            with self._lock:
                self._seq += 1
                self._entries.append(FormedRecord(self._seq, now, monotonic, form, span, values))
        return True

    def get_entries(
        self,
        level: AuditLevel | None = None,
        category: str | None = None,
        sandbox_id: str | None = None,
        limit: int | None = None,
    ) -> list[AuditEntry]:
        """Return the remembered entries of at least `level`, oldest first; at most the last
        `limit`.

        The category `file` also has the violations about files.
        """
        with self._lock:
            entries = [
                entry.entry() if isinstance(entry, FormedRecord) else entry
                for entry in self._entries
            ]
            self._entries = collections.deque(entries, self._entries.maxlen)
            found = [
                entry
                for entry in entries
                if (level is None or entry.level >= level)
                and (category in (None, entry.category) or _is_about(entry, category))
                and sandbox_id in (None, entry.sandbox_id)
            ]
        return found if limit is None else found[-limit:] if limit else []

    def get_denied_actions(self, sandbox_id: str | None = None) -> list[AuditEntry]:
        """Return the remembered refusals."""
        return [entry for entry in self.get_entries(sandbox_id=sandbox_id) if not entry.allowed]

    def get_summary(self) -> dict[str, Any]:
        """Return counts of the remembered entries."""
        return summary_of(self.get_entries())

    def export_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the remembered entries, one JSON object a line; an existing file is replaced."""
        new = f"{os.fspath(path)}.{os.urandom(4).hex()}.new"
        with open(new, "xb") as file:
            for entry in self.get_entries():
                file.write(msgspec.json.encode(entry) + b"\n")
        os.replace(new, path)

    def clear(self) -> None:
        """Forget the remembered entries; a file keeps all."""
        with self._lock:
            self._entries.clear()

    def close(self) -> None:
        """Write owed records and close the file; a log with a file takes no records afterwards."""
        with self._lock:
            if self._trail and not self._closed:
                self._closed = True
                self._trail.close()

    def _put(self, fields: dict[str, Any], owed: bool) -> bool:
        if self._trail is None:
            self._seq += 1
            self._remember(AuditEntry(seq=self._seq, **fields))
            return True
        try:
            if self._closed:
                raise AuditError("the audit log was closed")
            self._trail.put(fields, owed=owed)
        except AuditError:
            if self._required and not owed:
                raise
            if not owed:
                self._remember(AuditEntry(seq=0, **fields))
            return False
        return True

    def _remember(self, entry: AuditEntry) -> None:
        self._entries.append(entry)
        if self._on_entry:
            self._undelivered.append(entry)

    def _tell(self, on_entry: OnEntry) -> None:
        """Call `on_entry` outside the lock, so that it may use the log from any thread."""
        while True:
            try:
                entry = self._undelivered.popleft()
            except IndexError:
                return
            on_entry(entry)


def _is_about(entry: AuditEntry, category: str | None) -> bool:
    rule = str(entry.details.get("rule", ""))
    return (category, entry.category) == ("file", "violation") and rule.startswith(_FILE_RULES)


Fields = dict[str, Any]  # the fields of an AuditEntry without its number
_MOST_OWED = 1024
_HINT = "make room or give another path; AuditLog(required=False) goes on without"


class Trail:
    """Writes records into one file and its successors, in order.  Not thread-safe.

    A record that cannot be written is either owed, and written before the next one, or lost, and
    counted in a record of the trail itself: no record vanishes silently.
    """

    def __init__(
        self, path: Path, key: bytes | None, durability: Durability, rotate_bytes: int,
        on_written: Callable[[AuditEntry], None],
    ) -> None:  # fmt: skip
        """Open the file; raises AuditError if that fails."""
        self._path = path
        self._key = key
        self._durability = durability
        self._rotate_bytes = rotate_bytes
        self._on_written = on_written
        self._owner = os.getpid()
        self._owed: collections.deque[Fields] = collections.deque()
        self._lost = 0
        self._file: AuditFile | None = AuditFile(path, key, durability)
        self._link = self._file.link
        self._note_repair(self._file)
        self._owed.extend(map(_lost, unfinished(self._file.descriptor, path)))
        self._pay()

    @property
    def link(self) -> Link:
        """The last written record."""
        return self._link

    def put(self, fields: Fields, *, owed: bool = False) -> AuditEntry:
        """Write a record after the owed ones; raises AuditError if that fails.

        A record that fails is lost or, with `owed`, written with the next one.
        """
        try:
            self._check_owner()
            return self._put(fields)
        except (OSError, AuditError) as error:
            if owed and len(self._owed) < _MOST_OWED:
                self._owed.append(fields)
            else:
                self._lost += 1
            why, hint = _words(error)
            raise AuditError(f"cannot write the audit trail {self._path}: {why}", hint) from None

    def close(self) -> None:
        """Write owed records, if that works now, and close the file."""
        if os.getpid() == self._owner:
            self._pay()
        self._close_file()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:  # two processes would write the same numbers
            raise AuditError("it was opened before this process was forked")

    def _put(self, fields: Fields) -> AuditEntry:
        try:
            self._settle()
            return self._write(fields)
        except StaleFile:
            self._reopen()
        try:
            self._settle()
            return self._write(fields)
        except StaleFile:
            raise AuditError("somebody else keeps changing it") from None

    def _settle(self) -> None:
        """Make sure that a file is open and that everything before the next record is in it."""
        if self._file is None:
            self._reopen()
        elif self._file.size > self._rotate_bytes:
            self._file = self._file.rotate()
        if self._lost:
            self._write(_own("gap", records_lost=self._lost))
            self._lost = 0
        while self._owed:
            self._write(self._owed[0])
            self._owed.popleft()

    def _pay(self) -> None:
        with contextlib.suppress(OSError, AuditError, StaleFile):
            self._settle()

    def _write(self, fields: Fields) -> AuditEntry:
        if self._file is None:
            raise StaleFile
        entry = AuditEntry(seq=self._file.link.seq + 1, **fields)
        line, own = line_of(entry, self._file.link.hash, self._key)
        self._file.append(line, Link(entry.seq, own))
        self._link = self._file.link
        self._on_written(entry)
        return entry

    def _reopen(self) -> None:
        """Open the file that the path leads to now, and note how it differs from the last written
        state."""
        self._close_file()
        self._file = AuditFile(self._path, self._key, self._durability, self._link)
        found = self._file.link if self._file.size else end_of_rotated(self._path)
        if found != self._link:
            self._note(
                "replaced", records_missing=max(0, self._link.seq - found.seq),
                seq_before=self._link.seq, hash_before=self._link.hash.decode(),
            )  # fmt: skip
        self._note_repair(self._file)

    def _note_repair(self, file: AuditFile) -> None:
        if file.repair:
            self._note("recovery", **file.repair._asdict())

    def _note(self, action: str, **details: Any) -> None:
        """Owe a record about the trail itself, before all others."""
        if len(self._owed) < 2 * _MOST_OWED:
            self._owed.appendleft(_own(action, **details))

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _own(action: str, **details: Any) -> Fields:
    return {
        "time": time.time(), "monotonic": time.monotonic(), "level": AuditLevel.ERROR,
        "category": "log", "action": action, "details": details,
    }  # fmt: skip


def _lost(start: AuditEntry) -> Fields:
    """Return the end record of an execution whose end is unknown."""
    lost = _own("lost", execution_id=start.details.get("execution_id", ""))
    ours = {
        name: getattr(start, name) for name in ("sandbox_id", "trace_id", "span_id", "parent_id")
    }
    why = "the process that wrote the trail was killed"
    return {**lost, **ours, "category": "execution", "target": why}


def _words(error: OSError | AuditError) -> tuple[str, str]:
    if isinstance(error, OSError):
        return error.strerror or str(error), _HINT
    return str(error).partition("\nhint: ")[0], error.hint or _HINT

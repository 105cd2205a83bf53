"""`Trail`: writes records into a file in order, when the disk is full or another program meddles
too.

A record that cannot be written is either owed, and written before the next one, or lost, and
counted in a record of the trail itself: no record vanishes silently.
"""

import collections
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...policies.errors import AuditError
from .file import AuditFile, Durability, StaleFile
from .level import AuditLevel
from .record import AuditEntry, line_of
from .recovery import end_of_rotated, unfinished
from .verification import Link

Fields = dict[str, Any]  # of an AuditEntry, without its number
_MOST_OWED = 1024
_HINT = "make room or give another path; AuditLog(required=False) goes on without"


class Trail:
    """Writes records into one file and its successors.  Not thread-safe."""

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
    """Return a record about the trail itself."""
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

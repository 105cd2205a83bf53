"""The file of a trail: append-only, written by one process at a time, in whole lines."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ...policies.errors import AuditError
from .record import BEGINS, LONGEST_LINE, WRONG_HASH, AuditEntry, hash_of, why_broken
from .verification import (
    BEGINNING,
    Link,
    lines_of,
    link_before,
    link_of,
    parsed,
    rotated_name,
    rotations_of,
)

Durability = Literal["none", "batched", "every"]
_BATCH_RECORDS = 256
_BATCH_SECONDS = 1.0
# O_NOFOLLOW: a link could lead to another user's file; O_NONBLOCK: a FIFO would block us.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class StaleFile(Exception):  # noqa: N818 - what happened
    """The path leads to another file now, or another program wrote to the file or truncated it."""


class AuditFile:
    """An open trail; `link` is its last record, `repair` describes what opening it put aside."""

    def __init__(
        self, path: Path, key: bytes | None, durability: Durability, after: Link | None = None
    ) -> None:
        """Open or create the file; an empty one continues after the record `after`.

        Raises AuditError if the file cannot be opened, is not a trail, or belongs to another user.
        """
        self._path = path
        self._name = os.fspath(path)
        self._key = key
        self._durability = durability
        self._unsynced = 0
        self._synced_at = time.monotonic()
        self.descriptor = _open(path)
        try:
            self._take_over(after)
        except OSError as error:
            self.close()
            raise AuditError(f"cannot read {path}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _take_over(self, after: Link | None) -> None:
        before = after or end_of_rotated(self._path)
        self.link, good = last_good(self.descriptor, self._path, before, self._key)
        self.repair = put_aside(self.descriptor, self._path, good)
        status = os.fstat(self.descriptor)
        self.size = status.st_size
        self._inode = (status.st_dev, status.st_ino)
        if self._durability != "none":
            self._sync_directory()

    def append(self, line: bytes, link: Link) -> None:
        """Write one line, the record `link`, whole or not at all.

        Raises OSError if the disk refuses it, StaleFile if the file changed since our last write.
        """
        if not self._is_as_we_left_it():
            raise StaleFile
        try:
            if os.write(self.descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._sync()
        except OSError:
            # If this also fails, the file stays longer than recorded, and the next record repairs it.
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(line)
        self.link = link

    def rotate(self) -> "AuditFile":
        """Put this file aside under the next number and return a new one that continues it.

        Raises StaleFile, OSError and what opening raises.
        """
        if not self._is_as_we_left_it():
            raise StaleFile
        if self._durability != "none":
            self._flush()
        number = max(rotations_of(self._path), default=0) + 1
        os.rename(self._path, rotated_name(self._path, number))
        self.close()
        return AuditFile(self._path, self._key, self._durability, self.link)

    def close(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                if self._unsynced:
                    os.fdatasync(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def _is_as_we_left_it(self) -> bool:
        try:
            status = os.lstat(self._name)
        except OSError:
            return False
        return status.st_size == self.size and (status.st_dev, status.st_ino) == self._inode

    def _sync(self) -> None:
        if self._durability == "none":
            return
        self._unsynced += 1
        late = time.monotonic() - self._synced_at > _BATCH_SECONDS
        if self._durability == "every" or self._unsynced >= _BATCH_RECORDS or late:
            self._flush()

    def _flush(self) -> None:
        os.fdatasync(self.descriptor)
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def _sync_directory(self) -> None:
        """Make the file's name durable: fsync(2) of a file does not cover its name."""
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise AuditError(f"cannot open {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AuditError(f"{path} is not a regular file")
        lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# Repair of a trail that does not end cleanly, and of records of programs that were running. The
# longest valid beginning stays. The rest is copied aside and synced before it is cut off, so that
# it can be examined later; while there is no room for the copy, nothing is cut.
_SPAN = re.compile(rb'"span_id":"([0-9a-f]{16})"')
# Quotes inside a text are escaped, so that no guest can write these words.
_EXECUTION = b'"category":"execution","action":"'
_START = _EXECUTION + b'start"'


class Repair(NamedTuple):
    """The outcome of repairing a damaged file."""

    bytes_put_aside: int
    where: str


def last_good(descriptor: int, path: Path, before: Link, key: bytes | None) -> tuple[Link, int]:
    """Return the last valid record and its end; `before` is the link that an empty file continues.

    Raises AuditError for a file that never was a trail, or that has another key: such files are not
    put aside.
    """
    good, link = 0, before
    with _lines(descriptor) as lines:
        for number, line in enumerate(lines):
            if number == 0:
                _check_that_it_is_a_trail(line, path)
                link = link_before(line) if line.endswith(b"\n") else before
            why = why_broken(line[:-1], link.hash, link.seq + 1, key)
            if number == 0 and why == WRONG_HASH:
                hint = (
                    "give the key that it was written with; if its words were changed, move it away"
                )
                raise AuditError(f"the first record of {path} does not fit the key", hint)
            if why or not line.endswith(b"\n"):
                break
            link = Link(link.seq + 1, hash_of(line[:-1]))
            good += len(line)
    return (link if good else before), good


def _check_that_it_is_a_trail(line: bytes, path: Path) -> None:
    """Accept a torn first record, and NULs, which some file systems leave after a power cut."""
    start = line[: len(BEGINS)]
    if not BEGINS.startswith(start) and start.strip(b"\0"):
        hint = "give the path of a trail, or of a file that does not exist"
        raise AuditError(f"{path} is not an audit trail", hint)


@contextlib.contextmanager
def _lines(descriptor: int) -> Iterator[Iterator[bytes]]:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        yield lines_of(file)


def end_of_rotated(path: Path) -> Link:
    """Return the last record that was rotated out, which a new file continues."""
    numbers = rotations_of(path)
    if not numbers:
        return BEGINNING
    with rotated_name(path, numbers[-1]).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * LONGEST_LINE))
        ends = [link for line in lines_of(file) if (link := link_of(line))]
    return ends[-1] if ends else BEGINNING


def put_aside(descriptor: int, path: Path, good: int) -> Repair | None:
    """Cut off everything behind the valid beginning, once a copy is safe; None if there is nothing.

    Raises AuditError if there is no room for the copy.
    """
    size = os.fstat(descriptor).st_size
    if size == good:
        return None
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    try:
        _copy(descriptor, aside, good, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        hint = "make room: it is kept, and nothing is cut off, until it can be copied"
        message = f"cannot put the damaged end of {path} aside: {error.strerror}"
        raise AuditError(message, hint) from None
    os.ftruncate(descriptor, good)
    return Repair(size - good, aside.name)


def _copy(descriptor: int, aside: Path, begin: int, end: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(aside, flags, 0o600), "wb") as file:
        while begin < end:
            copied = os.sendfile(file.fileno(), descriptor, begin, end - begin)
            if not copied:  # another program truncated it meanwhile
                return
            begin += copied
        os.fsync(file.fileno())


def unfinished(descriptor: int, path: Path) -> list[AuditEntry]:
    """Return the starts of executions without an end: their writer was killed.

    Of the rotated files only the newest is read: no execution lasts longer.
    """
    open_: dict[bytes, bytes] = {}
    for number in rotations_of(path)[-1:]:
        with rotated_name(path, number).open("rb") as file:
            _follow(lines_of(file), open_)
    with _lines(descriptor) as lines:
        _follow(lines, open_)
    return list(parsed(open_.values()))


def _follow(lines: Iterator[bytes], open_: dict[bytes, bytes]) -> None:
    for line in lines:
        if _EXECUTION in line and (span := _SPAN.search(line)):
            if _START in line:
                open_[span[1]] = line
            else:
                open_.pop(span[1], None)


def lock(descriptor: int, path: Path) -> None:
    """Make this process the only writer of the file; raises AuditError if there is another."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        hint = "give every process a trail of its own"
        raise AuditError(f"{path} is being written by another process", hint) from None

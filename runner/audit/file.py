"""The file that a trail grows in: only appended to, by one process at a time.

After every write it ends in a whole line.  Should it not, because the process was killed in the
middle of one or somebody changed the file, the longest good beginning is kept, the rest is put aside,
and that is itself recorded.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Literal, NamedTuple

from ...policies.errors import AuditError
from .record import hash_of, why_broken
from .verification import BEGINNING, Link, files_of, link_before

Durability = Literal["none", "batched", "every"]
_BATCH_RECORDS = 256
_BATCH_SECONDS = 1.0
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Repair(NamedTuple):
    """What opening a damaged file came to."""

    bytes_put_aside: int
    where: str


class AuditFile:
    """An open trail; `link` is the last record in it."""

    def __init__(self, path: Path, key: bytes | None, durability: Durability) -> None:
        """Open or make the file; raises AuditError if it cannot be had or is somebody else's."""
        self.path = path
        self._key = key
        self._durability = durability
        self._unsynced = 0
        self._synced_at = time.monotonic()
        self._descriptor = self._open()
        try:
            self.link, good = self._last_good()
            self.repair = self._put_aside(good)
            self._identity = self._stat()
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes, link: Link) -> None:
        """Write one line, which is the record `link`, whole or not at all.

        Raises OSError if the disk does not take it, StaleFile if the file is not as we left it.
        """
        if self._on_disk() != self._identity:
            raise StaleFile
        size = self._identity.size
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            written = -1
        if written != len(line):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._identity = self._identity._replace(size=size + written)
        self.link = link
        self._sync()

    @property
    def size(self) -> int:
        return self._identity.size

    def rotate(self) -> "AuditFile":
        """Put this file aside under the next number and return a new one."""
        numbers = [int(each.suffix[1:]) for each in files_of(self.path)[:-1]]
        link = self.link
        self.path.rename(f"{self.path}.{max(numbers, default=0) + 1}")
        self._flush()
        self.close()
        fresh = AuditFile(self.path, self._key, self._durability)
        fresh.link = link
        return fresh

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                if self._durability != "none":
                    os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        try:
            descriptor = os.open(self.path, _FLAGS, 0o600)
        except OSError as error:
            raise AuditError(f"cannot open {self.path}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AuditError(f"{self.path} is not a regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            hint = "give every process a trail of its own"
            raise AuditError(f"{self.path} is being written by another process", hint) from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _last_good(self) -> tuple[Link, int]:
        """Return the last record that holds and where it ends."""
        good, link = 0, self._end_of_rotated()
        with open(self._descriptor, "rb", closefd=False) as lines:
            for line in lines:
                link = link or link_before(line)
                if not line.endswith(b"\n") or why_broken(line[:-1], *_next(link), self._key):
                    break
                link = Link(link.seq + 1, hash_of(line[:-1]))
                good += len(line)
        return link or BEGINNING, good

    def _end_of_rotated(self) -> Link | None:
        """Return the last record that was rotated out, after which this file goes on."""
        for file in reversed(files_of(self.path)[:-1]):
            last = file.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            return Link(link_before(last).seq + 1, hash_of(last))
        return None

    def _put_aside(self, good: int) -> Repair | None:
        size = os.fstat(self._descriptor).st_size
        if size == good:
            return None
        aside = f"{self.path}.damaged-{time.time_ns()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError), open(os.open(aside, flags, 0o600), "wb") as file:
            file.write(os.pread(self._descriptor, size - good, good))
        os.ftruncate(self._descriptor, good)
        return Repair(size - good, os.path.basename(aside))

    def _stat(self) -> "_Identity":
        return _Identity.of(os.fstat(self._descriptor))

    def _on_disk(self) -> "_Identity | None":
        try:
            return _Identity.of(os.stat(self.path, follow_symlinks=False))
        except OSError:
            return None

    def _sync(self) -> None:
        if self._durability == "none":
            return
        self._unsynced += 1
        due = (
            self._unsynced >= _BATCH_RECORDS or time.monotonic() - self._synced_at > _BATCH_SECONDS
        )
        if self._durability == "every" or due:
            self._flush()

    def _flush(self) -> None:
        os.fdatasync(self._descriptor)
        self._unsynced = 0
        self._synced_at = time.monotonic()


class StaleFile(Exception):  # noqa: N818 - what happened
    """The path leads to another file now, or somebody else wrote to it or cut it."""


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Identity":
        return cls(status.st_dev, status.st_ino, status.st_size)


def _next(link: Link) -> tuple[bytes, int]:
    return link.hash, link.seq + 1

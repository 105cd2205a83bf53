"""The file of a trail: append-only, written by one process at a time, in whole lines."""

import contextlib
import errno
import os
import stat
import time
from pathlib import Path
from typing import Literal

from ...policies.errors import AuditError
from .recovery import end_of_rotated, last_good, lock, put_aside
from .verification import Link, rotated_name, rotations_of

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
            # If this fails too, the file is longer than recorded; the next record repairs that.
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

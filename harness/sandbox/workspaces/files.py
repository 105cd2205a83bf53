"""How a workspace lies on the disk: sealed, replaced whole, and locked while somebody uses it."""

import contextlib
import fcntl
import hashlib
import os
import select
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from ....policies.errors import BusyError, WorkspaceError

_SEAL_BYTES = 1024  # a pax header: its own block, and one for its only record
_PRIVATE = 0o600
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_GLANCE_MS = 20


class CalledOff(Exception):  # noqa: N818 - not an error: nobody waits any more
    """Who waited for a lock was called off."""


def read_sealed(path: Path) -> bytes | None:
    """Return the archive of a file, None if there is no file; raises WorkspaceError if it is not what
    was written.  Its bytes are compared before anything parses them: tarfile takes a damaged header
    for the end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceError(f"cannot read {path}: {error.strerror}") from None
    archive = data[_SEAL_BYTES:]
    if data[:_SEAL_BYTES] != _seal(archive):
        raise WorkspaceError(
            f"{path} is damaged, or not a workspace of cellwright",
            "tar can list what it holds; remove it, or put an older copy there",
        )
    return archive


def write_sealed(path: Path, archive: bytes) -> None:
    """Have `path` hold an archive, or what it held before; raises WorkspaceError.

    Who calls it has the lock: what lies at the other name was left by one that was killed.
    """
    other = path.with_name(f".{path.stem}.new")
    try:
        descriptor = os.open(other, _NEW, _PRIVATE)
        with open(descriptor, "wb") as file:
            file.write(_seal(archive))
            file.write(archive)
            file.flush()
            os.fsync(descriptor)
        os.rename(other, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(other)
        raise WorkspaceError(f"cannot write {path}: {error.strerror}") from None


def remove_file(path: Path) -> None:
    """Remove a workspace if it is there; raises WorkspaceError."""
    try:
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise WorkspaceError(f"cannot remove {path}: {error.strerror}") from None


def take_lock(
    directory: Path, name: str, seconds: float, cancel: int, on_wait: Callable[[str], None]
) -> int:
    """Return a descriptor that holds the lock of a workspace; raises BusyError after `seconds`,
    CalledOff once the descriptor `cancel` is readable.  `on_wait` is told the name, once, where it
    has to be waited for.

    The kernel lets go of it however its holder ends.  flock(2) knows no deadline, and a lock is let
    go of only after inotify(7) has told of the close; so we look again.
    """
    deadline = time.monotonic() + seconds
    path = directory / f".{name}.lock"
    poll = select.poll()
    if cancel >= 0:
        poll.register(cancel, select.POLLIN)
    told = False
    while (lock := _try_lock(path)) is None:
        if not told:
            told = True
            on_wait(name)
        if time.monotonic() >= deadline:
            raise BusyError(
                f"workspace {name!r} is in use, and was not given back in {seconds:g} s",
                "one call or session at a time; use another name, or try again later",
            )
        if poll.poll(_GLANCE_MS):
            raise CalledOff
    return lock


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, None if somebody else does."""
    try:
        lock = os.open(path, _LOCK, _PRIVATE)
    except OSError as error:
        raise WorkspaceError(f"cannot lock {path}: {error.strerror}") from None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == os.stat(path).st_ino:  # or its last holder took it away
            return lock
    os.close(lock)
    return None


def _seal(archive: bytes) -> bytes:
    """Return what stands before an archive: a header that tar(1) skips, with a digest of it."""
    digest = hashlib.sha256(archive).hexdigest()
    return tarfile.TarInfo.create_pax_global_header({"cellwright.sha256": digest})


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""Files of workspaces: sealed with a digest, replaced atomically, and locked while in use."""

import contextlib
import fcntl
import hashlib
import os
import select
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ....policies.errors import BusyError, WorkspaceError

_SEAL_BYTES = 1024  # a pax header: its own block, and one for its only record
_PRIVATE = 0o600
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_MS = 20


class LockCancelled(Exception):  # noqa: N818 - the caller asked for it
    """Waiting for the lock was cancelled."""


def read_sealed(path: Path) -> bytes | None:
    """Return the archive in a file, None if there is no file.

    Raises WorkspaceError if its digest is wrong.  It is checked before anything parses the archive:
    tarfile takes a damaged header for the end.
    """
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
            "tar can list its content; remove it, or restore an older copy",
        )
    return archive


def write_sealed(path: Path, archive: bytes) -> None:
    """Replace the content of `path` by an archive, atomically; raises WorkspaceError.

    The caller holds the lock, so a temporary file that is already there was left by a killed process.
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
    """Remove a workspace if it exists; raises WorkspaceError."""
    try:
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise WorkspaceError(f"cannot remove {path}: {error.strerror}") from None


def rename_file(path: Path, target: Path) -> None:
    """Give a file another name, in place of the file that has it; raises WorkspaceError."""
    try:
        os.rename(path, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise WorkspaceError(f"cannot write {target}: {error.strerror}") from None


def last_use(paths: Iterable[Path]) -> float | None:
    """Return when one of these files was last used, None if none is there; raises WorkspaceError."""
    times = []
    for path in paths:
        try:
            times.append(os.stat(path, follow_symlinks=False).st_mtime)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise WorkspaceError(f"cannot read {path}: {error.strerror}") from None
    return max(times, default=None)


def note_use(paths: Iterable[Path]) -> None:
    """Note that these files are used now; those that are missing, or another user's, are left."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def take_lock(
    directory: Path, name: str, seconds: float, cancel: int, on_wait: Callable[[str], None]
) -> int:
    """Return a descriptor that holds the lock of a workspace.

    If another holder has it, `on_wait` is called once with the name.  Raises BusyError after `seconds`,
    LockCancelled once the descriptor `cancel` is readable.

    The kernel releases the lock however its holder ends.  flock(2) has no timeout, and inotify(7)
    reports a close before the lock is released, so this polls.
    """
    deadline = time.monotonic() + seconds
    poll = select.poll()
    if cancel >= 0:
        poll.register(cancel, select.POLLIN)
    told = False
    while (lock := try_lock(directory, name)) is None:
        if not told:
            told = True
            on_wait(name)
        if time.monotonic() >= deadline:
            raise BusyError(
                f"workspace {name!r} is in use, and was not released within {seconds:g} s",
                "one call or session at a time; use another name, or try again later",
            )
        if poll.poll(_POLL_MS):
            raise LockCancelled
    return lock


def try_lock(directory: Path, name: str) -> int | None:
    """Return a descriptor that holds the lock of a workspace, None if another holder does."""
    path = directory / f".{name}.lock"
    try:
        lock = os.open(path, _LOCK, _PRIVATE)
    except OSError as error:
        raise WorkspaceError(f"cannot lock {path}: {error.strerror}") from None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (
            os.fstat(lock).st_ino == os.stat(path).st_ino
        ):  # else its last holder has removed the file
            return lock
    os.close(lock)
    return None


def _seal(archive: bytes) -> bytes:
    """Return the header before an archive: one that tar(1) skips, with a digest of the archive."""
    digest = hashlib.sha256(archive).hexdigest()
    return tarfile.TarInfo.create_pax_global_header({"cellwright.sha256": digest})


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

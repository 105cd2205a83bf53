"""Files of workspaces: sealed with a digest, replaced atomically, and locked while in use.

Changes of named workspaces that wait for review: the files before and after, compared.
"""

import contextlib
import fcntl
import hashlib
import os
import select
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from ....policies.errors import BusyError, WorkspaceError
from ....runner.cells.workspace import Executable

_SEAL_BYTES = 1024  # a pax header: a block for itself and a block for its record
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
    """Update the times of use of these files; missing files and those of other users are skipped."""
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
        ):  # otherwise its last holder has removed the file
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


_ID_CHARACTERS = 32  # 128 bits: a program cannot make two changes of one id


class FileVersion(msgspec.Struct, frozen=True):
    """One version of a file of a workspace."""

    size_bytes: int
    sha256: str
    executable: bool


class FileChange(msgspec.Struct, frozen=True):
    """A file that a pending change adds (`before` is None), changes or removes (`after` is None).

    A file that differs only in the executable bit counts as changed.
    """

    path: str
    kind: Literal["added", "changed", "removed"]
    before: FileVersion | None
    after: FileVersion | None


class WorkspaceDiff(msgspec.Struct, frozen=True):
    """The difference that committing a workspace makes, by path.

    id: names exactly this difference, for `commit` and `discard`; empty if no change is pending
    """

    name: str
    id: str
    changes: tuple[FileChange, ...]

    @property
    def added(self) -> tuple[FileChange, ...]:
        return self._of_kind("added")

    @property
    def changed(self) -> tuple[FileChange, ...]:
        return self._of_kind("changed")

    @property
    def removed(self) -> tuple[FileChange, ...]:
        return self._of_kind("removed")

    def _of_kind(self, kind: str) -> tuple[FileChange, ...]:
        return tuple(each for each in self.changes if each.kind == kind)


def change_id(before: bytes, after: bytes) -> str:
    """Return the id of the change from one archive to another."""
    digests = hashlib.sha256(before).digest() + hashlib.sha256(after).digest()
    return hashlib.sha256(digests).hexdigest()[:_ID_CHARACTERS]


def changes_between(
    before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> tuple[FileChange, ...]:
    """Return the files that differ in content or in the executable bit."""
    return tuple(
        change
        for path in sorted(before.keys() | after.keys())
        if (change := _change(path, before.get(path), after.get(path)))
    )


def _change(path: str, before: bytes | None, after: bytes | None) -> FileChange | None:
    if before is None or after is None:
        kind: Literal["added", "removed"] = "added" if before is None else "removed"
        return FileChange(path, kind, _version(before), _version(after))
    if before == after and _is_executable(before) == _is_executable(after):
        return None
    return FileChange(path, "changed", _version(before), _version(after))


def _version(content: bytes | None) -> FileVersion | None:
    if content is None:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return FileVersion(len(content), digest, _is_executable(content))


def _is_executable(content: bytes) -> bool:
    return isinstance(content, Executable)

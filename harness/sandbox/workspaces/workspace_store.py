"""`Workspaces`: named sets of files that outlive their cells, in a directory of the user.

    NAME.tar       the files of a workspace
    NAME.pending   its files as a change that waits for review would have them
    .NAME.lock     held by the process that uses it

A workspace is one tar archive.  It is written to a temporary file, synced and renamed, so there is
always the old one or the new one; and no name that a program chose is ever a path of the host.  It
begins with a digest of the rest: a file that is damaged, or was not made by cellwright, is refused.
A pending change is a second such archive, which the commit renames.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ....policies.closing import Closing
from ....policies.errors import PolicyError, WorkspaceError
from ....policies.policy import MIB, check_limit
from ....runner.cells.workspace import KeptWorkspace, WorkspaceFile, content_of, list_all_files
from ....runner.concurrency import NEVER
from ...user_data import make_private_directory, state_directory
from ..calls.call_request import as_bytes, check_file_name, check_tree
from ..checks import MAX_FILES, check_flag
from .archive import pack, unpack
from .workspace_files import (
    WorkspaceDiff,
    change_id,
    changes_between,
    last_use,
    note_use,
    read_sealed,
    remove_file,
    rename_file,
    take_lock,
    try_lock,
    write_sealed,
)

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog

ShownFiles = Mapping[str, tuple[str, bytes]]  # by path: path and content as programs see them
ShowFiles = Callable[[Mapping[str, bytes]], ShownFiles]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LARGEST_BYTES = 192 * MIB  # fits into the one frame that goes into a cell
_WAIT_SECONDS = 30.0
_ARCHIVES = (".tar", ".pending")


def _ignore(_: str) -> None:
    """The default of `on_wait`."""


class Workspaces:
    """The workspaces in one directory; a missing one is made, with access for its owner alone.

    `directory`: default `cellwright/workspaces` in $XDG_STATE_HOME, else in ~/.local/state.
    `max_bytes`, `max_files`: the quota of each workspace; a save that exceeds it is refused.
    `max_age_seconds`: how long a workspace is kept after its last use, default without end. One that
    has expired is removed when it is opened, and by `prune`, never while it is in use. `review`: stage
    saved files as a pending change, which `commit` applies and `discard` drops; reading shows the files
    with that change. By default a workspace with a pending change cannot be opened. `audit`: the trail
    of commits and discards; saves are recorded in the trail of their sandbox. `wait_seconds`: how long
    to wait for a workspace that is in use, default 30; `on_wait` is called with its name when waiting
    begins.

    Safe from many threads and processes.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int = 64 * MIB,
        max_files: int = 4096, max_age_seconds: float | None = None, review: bool = False,
        wait_seconds: float = _WAIT_SECONDS, on_wait: Callable[[str], None] = _ignore,
        audit: "AuditLog | None" = None,
    ) -> None:  # fmt: skip
        check_limit("workspaces.max_bytes", max_bytes, whole=True)
        check_limit("workspaces.max_files", max_files, whole=True)
        check_limit("workspaces.wait_seconds", wait_seconds)
        if max_age_seconds is not None:
            check_limit("workspaces.max_age_seconds", max_age_seconds)
        if max_bytes > _LARGEST_BYTES or max_files > MAX_FILES:
            raise PolicyError(
                f"max_bytes, max_files: at most {_LARGEST_BYTES} bytes and {MAX_FILES} files"
            )
        self.directory = Path(directory or state_directory() / "workspaces")
        self.max_bytes = max_bytes
        self.max_files = max_files
        self.max_age_seconds = max_age_seconds
        self.review = check_flag("workspaces.review", review)
        self.wait_seconds = wait_seconds
        self.audit = audit
        self._on_wait = on_wait

    def list(self) -> tuple[str, ...]:
        """Return the names of the workspaces; one that has only pending files is among them."""
        if not self.directory.is_dir():
            return ()
        names = {path.stem for path in self.directory.iterdir() if path.suffix in _ARCHIVES}
        return tuple(sorted(name for name in names if _NAME.fullmatch(name)))

    def files(self, name: str) -> tuple[WorkspaceFile, ...]:
        """Return the files of a workspace; raises WorkspaceError if it is missing or damaged."""
        found = self._existing(name)
        return tuple(WorkspaceFile(path, len(data)) for path, data in sorted(found.items()))

    def size(self, name: str) -> int:
        """Return the total size of its files in bytes; raises WorkspaceError."""
        return sum(file.size_bytes for file in self.files(name))

    def used(self, name: str) -> float:
        """Return when it was last opened or released, in seconds since the epoch; raises
        WorkspaceError if it is missing."""
        _check_name(name)
        used = last_use(self.archives(name))
        if used is None:
            raise _not_found(name)
        return used

    def is_pending(self, name: str) -> bool:
        """Tell whether a change of a workspace waits for review."""
        _check_name(name)
        return self.archives(name)[1].exists()

    def read(self, name: str, path: str) -> bytes:
        """Return the content of one file; raises WorkspaceError."""
        return _file_of(name, self._existing(name), path)

    def write(self, name: str, path: str, data: str | bytes) -> None:
        """Write one file; a missing workspace is made.

        Raises WorkspaceError beyond the quota, BusyError if the workspace stays in use.
        """
        given = {check_file_name(path): as_bytes(path, data)}
        with self.open(name) as opened:
            files = opened.files() | given
            check_tree(files)
            opened.save(files)

    def remove(self, name: str, path: str | None = None) -> None:
        """Remove one file, or the workspace with its pending change.

        Raises WorkspaceError if it is missing, BusyError if the workspace stays in use.
        """
        with self.open(name) as opened:
            found = self._existing(name)
            if path is None:
                opened.remove()
            else:
                _file_of(name, found, path)
                opened.save({key: data for key, data in opened.files().items() if key != path})

    def diff(self, name: str) -> WorkspaceDiff:
        """Return the effect of committing the pending change; empty if none is pending.

        Raises WorkspaceError if the workspace is missing or damaged, BusyError if it stays in use.
        """
        return self._reviewed(name, "", lambda opened: opened.diff())

    def commit(self, name: str, change: str | None = None) -> WorkspaceDiff:
        """Make the pending change the files of the workspace, in one step, and return it.

        `change`: the id of the change that was reviewed; WorkspaceError if another one is pending by
        now.  Raises WorkspaceError if none is pending, or it exceeds the quota, BusyError.
        """
        return self._reviewed(name, "committed", lambda opened: opened.commit(change))

    def discard(self, name: str, change: str | None = None) -> WorkspaceDiff:
        """Drop the pending change, in one step, and return it; arguments and errors as `commit`."""
        return self._reviewed(name, "discarded", lambda opened: opened.discard(change))

    def prune(self, *, max_age_seconds: float | None = None) -> tuple[str, ...]:
        """Remove the workspaces that have expired, and return their names.

        `max_age_seconds`: how long they may be unused, default that of the store.  Those in use stay.
        Raises PolicyError if neither names an age, WorkspaceError if one cannot be removed.
        """
        age = self.max_age_seconds if max_age_seconds is None else max_age_seconds
        if age is None:
            raise PolicyError("max_age_seconds: required, since the store has no max_age_seconds")
        check_limit("max_age_seconds", age)
        return tuple(name for name in self.list() if self._is_pruned(name, age))

    def open(self, name: str, cancel: int = NEVER) -> "OpenWorkspace":
        """Lock a workspace, which need not exist yet, until it is closed.

        Raises PolicyError for an invalid name, BusyError if it stays in use, LockCancelled once the
        descriptor `cancel` is readable.
        """
        _check_name(name)
        make_private_directory(self.directory, WorkspaceError)
        lock = take_lock(self.directory, name, self.wait_seconds, cancel, self._on_wait)
        opened = OpenWorkspace(self, name, lock)
        try:
            if self.max_age_seconds is not None:
                opened.expire(self.max_age_seconds)
            note_use(self.archives(name))
        except BaseException:
            opened.close()
            raise
        return opened

    def archives(self, name: str) -> tuple[Path, Path]:
        """Return the paths of the archives of its files and of its pending change."""
        return self.directory / f"{name}.tar", self.directory / f"{name}.pending"

    def load(self, name: str) -> bytes | None:
        """Return the archive of a workspace as this store shows it, None if missing; raises
        WorkspaceError if damaged."""
        _check_name(name)
        kept, pending = self.archives(name)
        archive = read_sealed(pending) if self.review else None
        return read_sealed(kept) if archive is None else archive

    def check_quota(self, name: str, sizes: Mapping[str, int]) -> None:
        """Raise WorkspaceError if files of these sizes exceed the quota."""
        total = sum(sizes.values())
        if len(sizes) > self.max_files:
            raise WorkspaceError(
                f"workspace {name!r}: {len(sizes)} files, at most {self.max_files}"
            )
        if total > self.max_bytes:
            raise WorkspaceError(f"workspace {name!r}: {total} bytes, at most {self.max_bytes}")

    def _existing(self, name: str) -> dict[str, bytes]:
        archive = self.load(name)
        if archive is None and not self.is_pending(name):
            raise _not_found(name)
        return unpack(archive) if archive else {}

    def _reviewed(
        self, name: str, action: str, work: Callable[["OpenWorkspace"], WorkspaceDiff]
    ) -> WorkspaceDiff:
        """Return the change that `work` looks at or decides on; a decision, `action`, is recorded."""
        with self.open(name) as opened:
            if not any(path.exists() for path in self.archives(name)):
                raise _not_found(name)
            diff = work(opened)
        if action and self.audit:
            self.audit.record(
                "file", action, target=name, owed=True, change=diff.id, added=len(diff.added),
                changed=len(diff.changed), removed=len(diff.removed),
            )  # fmt: skip
        return diff

    def _is_pruned(self, name: str, age: float) -> bool:
        lock = try_lock(self.directory, name)
        if lock is None:
            return False
        with OpenWorkspace(self, name, lock, is_use=False) as opened:
            return opened.expire(age)


class _Shown(NamedTuple):
    """A file as programs see it, and its path and content as they are kept."""

    shown: bytes
    path: str
    content: bytes


class OpenWorkspace(Closing):
    """A workspace that is locked until it is closed; `kept` is the outcome of the last save."""

    def __init__(self, store: Workspaces, name: str, lock: int, *, is_use: bool = True) -> None:
        self.name = name
        self.kept: KeptWorkspace | None = None
        self._store = store
        self._path, self._pending = store.archives(name)
        self._lock = lock
        self._is_use = is_use
        self._guard = threading.Lock()
        self._instead: dict[str, _Shown] = {}

    def files(self) -> dict[str, bytes]:
        """Return its files; raises WorkspaceError if it is damaged, or cannot be changed because a
        change waits for review."""
        if not self._store.review and self._pending.exists():
            raise WorkspaceError(
                f"workspace {self.name!r} has a change that waits for review",
                "see `cellwright workspace diff`, then commit or discard it",
            )
        return _unpacked(self._store.load(self.name))

    def shown(self, show: "ShowFiles | None") -> dict[str, bytes]:
        """Return its files as programs see them.

        What `show` replaced is saved as it was, unless a program changes or removes the file.
        """
        files = self.files()
        if show is None:
            return files
        made = show(files)
        self._instead = {
            name: _Shown(content, path, files[path]) for path, (name, content) in made.items()
        }
        return dict(made.values())

    def keep(self, workspace: int) -> None:
        """Save the files below a descriptor of /workspace, all or none.

        Files that exceed the quota or cannot be read are refused, and `kept` says so.  Raises
        WorkspaceError if the host fails to write.
        """
        try:
            listing = list_all_files(workspace)
            sizes = {path: seen.size_bytes for path, seen in listing.items()}
            self._store.check_quota(self.name, sizes)  # before anything is read
            found = {path: content_of(workspace, path, seen) for path, seen in listing.items()}
        except WorkspaceError as error:
            self.refuse(str(error))
        else:
            self.save(found)

    def save(self, files: Mapping[str, bytes]) -> None:
        """Replace its files by these, or stage them as the pending change of a store with review.

        Raises WorkspaceError beyond the quota, or if writing fails.
        """
        files = dict(self._restored(path, data) for path, data in files.items())
        sizes = {path: len(data) for path, data in files.items()}
        self._store.check_quota(self.name, sizes)
        archive = pack(files)
        with self._guard:
            if self._lock < 0:
                raise WorkspaceError(f"workspace {self.name!r} was already closed")
            is_changed = archive != (read_sealed(self._path) or pack({}))
            if self._store.review:
                self._stage(archive, is_changed)
            elif is_changed:
                write_sealed(self._path, archive)
        state: Literal["staged", "saved"] = "staged" if self._store.review else "saved"
        self.kept = KeptWorkspace(
            self.name, state if is_changed else "unchanged", "", sum(sizes.values()), len(sizes)
        )

    def _restored(self, path: str, data: bytes) -> tuple[str, bytes]:
        """Return the stored form of a file; the original if a program did not change it."""
        seen = self._instead.get(path)
        if seen is None:
            return path, data
        return seen.path, seen.content if data == seen.shown else data

    def refuse(self, why: str) -> None:
        """Note that a save was refused, and the workspace is unchanged."""
        self.kept = KeptWorkspace(self.name, "refused", why)

    def diff(self) -> WorkspaceDiff:
        """Return the effect of a commit; raises WorkspaceError if an archive is damaged."""
        after = read_sealed(self._pending)
        if after is None:
            return WorkspaceDiff(self.name, "", ())
        before = read_sealed(self._path) or pack({})
        changes = changes_between(unpack(before), unpack(after))
        return WorkspaceDiff(self.name, change_id(before, after), changes)

    def commit(self, change: str | None = None) -> WorkspaceDiff:
        """Make the pending change its files, as `Workspaces.commit` does."""
        diff = self._expected(change)
        files = unpack(read_sealed(self._pending) or b"")
        self._store.check_quota(self.name, {path: len(data) for path, data in files.items()})
        rename_file(self._pending, self._path)
        return diff

    def discard(self, change: str | None = None) -> WorkspaceDiff:
        """Drop the pending change, as `Workspaces.discard` does."""
        diff = self._expected(change)
        remove_file(self._pending)
        return diff

    def remove(self) -> None:
        """Remove it; first its pending change, which is useless without it."""
        remove_file(self._pending)
        remove_file(self._path)
        self.kept = KeptWorkspace(self.name, "removed")

    def expire(self, age: float) -> bool:
        """Remove it if it was not used for `age` seconds; return whether it was."""
        used = last_use((self._path, self._pending))
        if used is None or time.time() - used < age:
            return False
        self.remove()
        return True

    def close(self) -> None:
        """Release it; closing twice is fine."""
        with self._guard:
            lock, self._lock = self._lock, -1
        if lock >= 0:
            if self._is_use:
                note_use((self._path, self._pending))
            with contextlib.suppress(OSError):  # the directory may be gone
                os.unlink(self._store.directory / f".{self.name}.lock")
            os.close(lock)

    def _stage(self, archive: bytes, is_changed: bool) -> None:
        """Make `archive` the pending change; none if it has the files of the workspace."""
        if not is_changed and self._pending.exists():
            remove_file(self._pending)
        elif is_changed and archive != read_sealed(self._pending):
            write_sealed(self._pending, archive)

    def _expected(self, change: str | None) -> WorkspaceDiff:
        """Return the pending change; raises WorkspaceError if there is none, or another one."""
        diff = self.diff()
        if not diff.id:
            raise WorkspaceError(f"workspace {self.name!r} has no pending change")
        if change not in (None, diff.id):
            raise WorkspaceError(
                f"workspace {self.name!r}: the pending change is {diff.id}, not {change!r}",
                "it was changed after it was reviewed: see `cellwright workspace diff`",
            )
        return diff


def workspaces_of(given: Workspaces | str | os.PathLike[str] | None) -> Workspaces:
    """Return the given workspaces, those of a given directory, or those of the user."""
    return given if isinstance(given, Workspaces) else Workspaces(given)


def _unpacked(archive: bytes | None) -> dict[str, bytes]:
    return {} if archive is None else unpack(archive)


def _file_of(name: str, files: Mapping[str, bytes], path: str) -> bytes:
    if path not in files:
        raise WorkspaceError(f"workspace {name!r} has no file {path!r}")
    return files[path]


def _not_found(name: str) -> WorkspaceError:
    return WorkspaceError(f"workspace {name!r} not found", "see `cellwright workspace list`")


def _check_name(name: str) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise PolicyError(
            f"workspace: invalid name {name!r}",
            "use 1 to 64 letters, digits, _ and -, beginning with a letter or digit",
        )

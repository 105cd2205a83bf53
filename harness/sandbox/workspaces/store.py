"""`Workspaces`: named sets of files that outlive their cells, in a directory of the user.

A workspace is one tar archive, `NAME.tar`.  It is written to a temporary file, synced and renamed, so
there is always the old one or the new one; and no name that a program chose is ever a path of the host.
It begins with a digest of the rest: a file that is damaged, or was not made by cellwright, is refused.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ....policies.closing import Closing
from ....policies.errors import PolicyError, WorkspaceError
from ....policies.policy import MIB, check_limit
from ....runner.concurrency import NEVER
from ....runner.workspace import KeptWorkspace, WorkspaceFile, content_of, list_all_files
from ...state import make_private_directory, state_directory
from ..archive import pack, unpack
from ..checks import MAX_FILES
from ..request import as_bytes, check_file_name, check_tree
from .files import read_sealed, remove_file, take_lock, write_sealed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LARGEST_BYTES = 192 * MIB  # fits into the one frame that goes into a cell
_WAIT_SECONDS = 30.0


def _say_nothing(_: str) -> None:
    """The default of `on_wait`."""


class Workspaces:
    """The workspaces in one directory; a missing one is made, with access for its owner alone.

    `directory`: default `cellwright/workspaces` in $XDG_STATE_HOME, else in ~/.local/state.
    `max_bytes`, `max_files`: the quota of each workspace; a save that exceeds it is refused.
    `wait_seconds`: how long to wait for a workspace that is in use, default 30; `on_wait` is called
    with its name when waiting begins.

    Safe from many threads and processes.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int = 64 * MIB,
        max_files: int = 4096, wait_seconds: float = _WAIT_SECONDS,
        on_wait: Callable[[str], None] = _say_nothing,
    ) -> None:  # fmt: skip
        check_limit("workspaces.max_bytes", max_bytes, whole=True)
        check_limit("workspaces.max_files", max_files, whole=True)
        check_limit("workspaces.wait_seconds", wait_seconds)
        if max_bytes > _LARGEST_BYTES or max_files > MAX_FILES:
            raise PolicyError(
                f"max_bytes, max_files: at most {_LARGEST_BYTES} bytes and {MAX_FILES} files"
            )
        self.directory = Path(directory or state_directory() / "workspaces")
        self.max_bytes = max_bytes
        self.max_files = max_files
        self.wait_seconds = wait_seconds
        self._on_wait = on_wait

    def list(self) -> tuple[str, ...]:
        """Return the names of the workspaces."""
        if not self.directory.is_dir():
            return ()
        names = (path.stem for path in self.directory.glob("*.tar"))
        return tuple(sorted(name for name in names if _NAME.fullmatch(name)))

    def files(self, name: str) -> tuple[WorkspaceFile, ...]:
        """Return the files of a workspace; raises WorkspaceError if it is missing or damaged."""
        found = self._existing(name)
        return tuple(WorkspaceFile(path, len(data)) for path, data in sorted(found.items()))

    def size(self, name: str) -> int:
        """Return the total size of its files in bytes; raises WorkspaceError."""
        return sum(file.size_bytes for file in self.files(name))

    def read(self, name: str, path: str) -> bytes:
        """Return the content of one file; raises WorkspaceError."""
        found = self._existing(name)
        if path not in found:
            raise WorkspaceError(f"workspace {name!r} has no file {path!r}")
        return found[path]

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
        """Remove one file, or the workspace; raises WorkspaceError if it is missing, BusyError."""
        with self.open(name) as opened:
            found = self._existing(name)
            if path is None:
                opened.remove()
            elif path in found:
                opened.save({key: data for key, data in found.items() if key != path})
            else:
                raise WorkspaceError(f"workspace {name!r} has no file {path!r}")

    def open(self, name: str, cancel: int = NEVER) -> "OpenWorkspace":
        """Lock a workspace, which need not exist yet, until it is closed.

        Raises PolicyError for an invalid name, BusyError if it stays in use, LockCancelled once the
        descriptor `cancel` is readable.
        """
        _check_name(name)
        make_private_directory(self.directory, WorkspaceError)
        lock = take_lock(self.directory, name, self.wait_seconds, cancel, self._on_wait)
        return OpenWorkspace(self, name, lock)

    def load(self, name: str) -> bytes | None:
        """Return the archive of a workspace, None if missing; raises WorkspaceError if damaged."""
        _check_name(name)
        return read_sealed(self.directory / f"{name}.tar")

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
        if archive is None:
            raise WorkspaceError(f"workspace {name!r} not found", "see `cellwright workspace list`")
        return unpack(archive)


class OpenWorkspace(Closing):
    """A workspace that is locked until it is closed; `kept` is the outcome of the last save."""

    def __init__(self, store: Workspaces, name: str, lock: int) -> None:
        self.name = name
        self.kept: KeptWorkspace | None = None
        self._store = store
        self._path = store.directory / f"{name}.tar"
        self._lock = lock
        self._guard = threading.Lock()

    def files(self) -> dict[str, bytes]:
        """Return its files; raises WorkspaceError if it is damaged."""
        archive = self._store.load(self.name)
        return {} if archive is None else unpack(archive)

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
        """Replace its files by these; raises WorkspaceError beyond the quota, or if writing fails."""
        sizes = {path: len(data) for path, data in files.items()}
        self._store.check_quota(self.name, sizes)
        archive = pack(files)
        with self._guard:
            if self._lock < 0:
                raise WorkspaceError(f"workspace {self.name!r} was already closed")
            changed = archive != (self._store.load(self.name) or pack({}))
            if changed:
                write_sealed(self._path, archive)
        self.kept = KeptWorkspace(
            self.name, "saved" if changed else "unchanged", "", sum(sizes.values()), len(sizes)
        )

    def refuse(self, why: str) -> None:
        """Note that a save was refused, and the workspace is unchanged."""
        self.kept = KeptWorkspace(self.name, "refused", why)

    def remove(self) -> None:
        remove_file(self._path)
        self.kept = KeptWorkspace(self.name, "removed")

    def close(self) -> None:
        """Release it; closing twice is fine."""
        with self._guard:
            lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):  # the directory may be gone
                os.unlink(self._store.directory / f".{self.name}.lock")
            os.close(lock)


def workspaces_of(given: Workspaces | str | os.PathLike[str] | None) -> Workspaces:
    """Return the given workspaces, those of a given directory, or those of the user."""
    return given if isinstance(given, Workspaces) else Workspaces(given)


def _check_name(name: str) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise PolicyError(
            f"workspace: invalid name {name!r}",
            "use 1 to 64 letters, digits, _ and -, beginning with a letter or digit",
        )

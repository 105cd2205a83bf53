"""Applying changes to a project: all of a request or nothing, also if this process is killed.

First the new content is written to a directory in the project, `staging`.  Then a journal, which lies
beside the upper directory, names every step.  Each step is a rename, and one that was done has left its
source: so the next request finishes the steps of a journal that a killed process left.

Every path is opened through no link, so a link that the project has never leads outside it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ....policies.errors import WorkspaceError
from ....runner.kernel.file_calls import allow_owner, remove_tree
from ...user_data import replace_file
from .git_index import INDEX, keep_index
from .upper import DIRECTORY, OPAQUE, Comparison, Difference, open_directory, open_file

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_SYNCED = 200  # files that are synced one by one; of more the whole system is
_CHUNK = 1 << 30


class RenameStep(msgspec.Struct, frozen=True):
    """Rename `path` of the project to old-NUMBER of the staging directory if it `removes` it, and then
    new-NUMBER there to `path` if it `installs` that."""

    path: bytes
    number: int
    removes: bool
    installs: bool


class Journal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps of a request, and its paths that the upper directory shall not have any more.

    `inode` is that of the staging directory.  `is_all`: the upper directory shall have nothing at all.
    `opaque` are directories that shall hide the project's no more, but for `whiteouts`, removals that
    still wait.
    """

    is_discard: bool = False

    inode: int = 0
    steps: tuple[RenameStep, ...] = ()
    is_installed: bool = False
    is_all: bool = False
    settled: tuple[bytes, ...] = ()
    whiteouts: tuple[bytes, ...] = ()
    opaque: tuple[bytes, ...] = ()


class Places(msgspec.Struct, frozen=True):
    """Open directories, the name of the staging directory in the project, and the journal's path."""

    project: int
    upper: int
    staging: str
    journal: Path

    @property
    def index(self) -> Path:
        """The index of git as the project had it when the first command started."""
        return self.journal.with_name("index")


def settle(
    changes: Sequence[Difference], chosen: Sequence[Difference], *, is_discard: bool = False
) -> Journal:
    """Return the journal that takes the `chosen` ones of all `changes` out of the upper directory."""
    if len(chosen) == len(changes):
        return Journal(is_all=True, is_installed=True)
    if any(each.opaque == "" for each in chosen):  # a copy: what was applied is no difference now
        if is_discard:
            raise WorkspaceError(
                "a part of the changes cannot be discarded: the command worked on a copy",
                "apply what you want, then discard the rest",
            )
        return Journal(is_installed=True)
    opaque = {each.opaque for each in chosen if each.opaque is not None}
    ours = {each.change.path for each in chosen}
    hidden = (
        each.change.path for each in changes
        if each.opaque in opaque and not each.has_entry and each.change.path not in ours
    )  # fmt: skip
    return Journal(
        settled=tuple(os.fsencode(each.change.path) for each in chosen if each.has_entry),
        whiteouts=tuple(map(os.fsencode, hidden)), opaque=tuple(map(os.fsencode, opaque)),
        is_installed=True, is_discard=is_discard,
    )  # fmt: skip


def stage(places: Places, chosen: Sequence[Difference], journal: Journal) -> Journal:
    """Write the new content of the chosen changes to the staging directory, durably, and return
    `journal` with the steps that install it.

    Raises WorkspaceError, and OSError; the project is unchanged then.
    """
    _check_room(places, chosen)
    os.mkdir(places.staging, 0o700, dir_fd=places.project)
    staging = open_directory(places.project, places.staging)
    try:
        steps = tuple(_Staging(places, staging).steps(chosen))
        if len(chosen) > _MOST_SYNCED:
            os.sync()
        os.fsync(staging)
        inode = os.fstat(staging).st_ino
    finally:
        os.close(staging)
    return replace(journal, inode=inode, steps=steps, is_installed=False)


def write(places: Places, journal: Journal) -> None:
    replace_file(places.journal, msgspec.json.encode(journal))
    with _opened(str(places.journal.parent)) as directory:
        os.fsync(directory)


def finish(places: Places) -> bool:
    """Do what a journal says, remove it, and return whether there was one; without one remove an
    unfinished staging directory.

    Raises WorkspaceError and OSError; the next call goes on.
    """
    try:
        journal = msgspec.json.decode(places.journal.read_bytes(), type=Journal)
    except FileNotFoundError:
        _remove_staging(places)
        _remove_moved(places)
        return False
    if not journal.is_installed:
        _install(places, journal)
        _note_applied(places, journal)
        journal = replace(journal, is_installed=True)
        write(places, journal)
    _remove_staging(places)
    if journal.is_all:
        _empty(places)
    else:
        _settle(places, journal)
    _remove_moved(places)
    places.journal.unlink()
    return True


def tidy(places: Places) -> None:
    """Remove what programs only touched, if no change waits."""
    if next(iter(Comparison(places.upper, places.project)), None) is None:
        discard_all(places)


def applied_times(places: Places) -> dict[str, int]:
    """Return the ctime of each file that was applied, as it was then."""
    try:
        found = msgspec.json.decode(_applied(places).read_bytes(), type=list[tuple[bytes, int]])
    except FileNotFoundError:
        return {}
    return {os.fsdecode(path): time for path, time in found}


def _note_applied(places: Places, journal: Journal) -> None:
    times = applied_times(places)
    for path in journal.settled:
        above, _, name = os.fsdecode(path).rpartition("/")
        with contextlib.suppress(OSError), _opened(above, places.project) as parent:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            times[os.fsdecode(path)] = found.st_ctime_ns
    if os.fsencode(INDEX) in journal.settled:
        keep_index(places.project, places.index)
    data = msgspec.json.encode([(os.fsencode(path), time) for path, time in times.items()])
    replace_file(_applied(places), data)


def _applied(places: Places) -> Path:
    return places.journal.with_name("applied.json")


class _Staging:
    """Writes the new content: new-NUMBER is a file, a link, or a directory with all beneath it."""

    def __init__(self, places: Places, staging: int) -> None:
        self._places, self._staging = places, staging
        root = os.fstat(places.project)
        self._owner = (root.st_uid, root.st_gid) if os.geteuid() == 0 else None
        self._synced = 0
        self._made: dict[str, int] = {}  # directories by their path, with the number of the step

    def steps(self, chosen: Sequence[Difference]) -> Iterator[RenameStep]:
        tops: dict[str, list[Difference]] = {}
        for each in chosen:
            tops.setdefault(each.top, []).append(each)
        for number, (top, below) in enumerate(tops.items()):
            kind, after = below[0].change.kind, below[0].change.after
            is_itself = below[0].change.path == top
            for each in below:
                if each.change.after is not None:
                    self._write(each, number)
            directory = after is not None and after.type == "directory"
            was_directory = bool(stat.S_ISDIR(below[0].mode))
            removes = kind == "removed" or (kind == "replaced" and (directory or was_directory))
            yield RenameStep(os.fsencode(top), number, is_itself and removes, after is not None)

    def _write(self, difference: Difference, number: int) -> None:
        change, top = difference.change, difference.top
        if change.after is None:
            return
        if change.after.type == "directory":
            self._directory(change.path, top, number)
            return
        if change.path == top:
            parent, name = os.dup(self._staging), f"new-{number}"
        else:
            above, _, name = change.path.rpartition("/")
            parent = open_directory(self._staging, self._directory(above, top, number))
        try:
            if change.after.type == "link":
                os.symlink(change.after.target, name, dir_fd=parent)
                self._own(parent, name)
            else:
                self._file(parent, name, difference)
        finally:
            os.close(parent)

    def _directory(self, path: str, top: str, number: int) -> str:
        """Make a directory of the upper one, with those above it, and return its staged path."""
        staged = f"new-{number}{path[len(top) :]}"
        if path not in self._made:
            if path != top:
                self._directory(path.rpartition("/")[0], top, number)
            above, _, name = staged.rpartition("/")
            with _opened(above or ".", self._staging) as parent:
                with _opened(path, self._places.upper) as found:
                    mode = os.fstat(found).st_mode
                os.mkdir(name, 0o700, dir_fd=parent)
                self._own(parent, name)
                with _opened(name, parent) as made:
                    os.fchmod(made, mode & 0o755 | 0o700)
            self._made[path] = number
        return staged

    def _own(self, parent: int, name: str) -> None:
        if self._owner:
            os.chown(name, *self._owner, dir_fd=parent, follow_symlinks=False)

    def _file(self, parent: int, name: str, difference: Difference) -> None:
        source = open_file(self._places.upper, difference.change.path, allow=True)
        try:
            found = os.fstat(source)
            target = os.open(name, _NEW, 0o600, dir_fd=parent)
            try:
                _copy(source, target, found.st_size)
                if self._owner:
                    os.fchown(target, *self._owner)
                os.fchmod(target, _mode(found.st_mode, difference.mode))
                self._synced += 1
                if self._synced <= _MOST_SYNCED:
                    os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(source)


def _mode(after: int, before: int) -> int:
    """Return the mode of a file that is written: of the old file, if there is one, else of the new one
    without what lets others write; executable for those who may read it, or for nobody."""
    mode = before & 0o666 if stat.S_ISREG(before) else after & 0o644 | 0o600
    return mode | (mode & 0o444) >> 2 if after & stat.S_IXUSR else mode


def _copy(source: int, target: int, size: int) -> None:
    """Copy a file, but not its holes: a sparse file claims more than it takes."""
    start = 0
    while start < size:
        try:
            start = os.lseek(source, start, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        end = os.lseek(source, start, os.SEEK_HOLE)
        os.lseek(target, start, os.SEEK_SET)
        while start < end and (
            sent := os.sendfile(target, source, start, min(end - start, _CHUNK))
        ):
            start += sent
    os.ftruncate(target, size)


def _check_room(places: Places, chosen: Iterable[Difference]) -> None:
    needed = sum(each.blocks for each in chosen)
    disk = os.fstatvfs(places.project)
    if needed > (free := disk.f_bavail * disk.f_frsize):
        raise WorkspaceError(f"the changes take {needed:,} bytes, and the disk has {free:,} free")
    for path in {each.top.rpartition("/")[0] for each in chosen}:
        with _opened(path, places.project) as parent:
            if not os.access(f"/proc/self/fd/{parent}", os.W_OK | os.X_OK, effective_ids=True):
                raise WorkspaceError(
                    f"cannot write to the directory {path or '.'!r} of the project"
                )


@contextlib.contextmanager
def _opened(path: str, root: int | None = None) -> Iterator[int]:
    opened = os.open(path, DIRECTORY) if root is None else open_directory(root, path)
    try:
        yield opened
    finally:
        os.close(opened)


def _install(places: Places, journal: Journal) -> None:
    if not journal.steps:
        return
    with _opened(places.staging, places.project) as staging:
        if os.fstat(staging).st_ino != journal.inode:
            raise WorkspaceError(
                f"{places.staging} in the project is not the directory that was made to apply changes"
            )
        for step in journal.steps:
            try:
                _take(places.project, staging, step, syncs=len(journal.steps) <= _MOST_SYNCED)
            except OSError as error:
                raise WorkspaceError(
                    f"cannot apply the change of {os.fsdecode(step.path)!r}: {error.strerror}",
                    "mend that; `cellwright changes` then finishes what was begun",
                ) from error
        if len(journal.steps) > _MOST_SYNCED:
            os.sync()
        os.fsync(staging)


def _take(project: int, staging: int, step: RenameStep, *, syncs: bool) -> None:
    new, old = f"new-{step.number}", f"old-{step.number}"
    if step.installs and not _exists(staging, new):
        return  # it was done before
    above, _, name = os.fsdecode(step.path).rpartition("/")
    with _opened(above, project) as parent:
        if step.removes and not _exists(staging, old) and _exists(parent, name):
            with contextlib.suppress(OSError):  # a directory that is moved must be writable
                if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    allow_owner(parent, os.fsencode(name), stat.S_IRWXU)
            os.rename(name, old, src_dir_fd=parent, dst_dir_fd=staging)
        if step.installs:
            os.rename(new, name, src_dir_fd=staging, dst_dir_fd=parent)
        if syncs:
            os.fsync(parent)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove_staging(places: Places) -> None:
    try:
        with _opened(places.staging, places.project) as staging:
            _clear(staging)
        os.rmdir(places.staging, dir_fd=places.project)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(places.staging, dir_fd=places.project)  # only a program of a cell makes that


def _clear(directory: int) -> None:
    """Remove all that lies in a directory, moving nothing out of it meanwhile."""
    for name in os.listdir(directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            remove_tree(directory, name)
        else:
            os.unlink(name, dir_fd=directory)


def discard_all(places: Places) -> None:
    """Take everything out of the upper directory, in one step; no change waits then."""
    _empty(places)
    for name in ("applied.json", "index", "change.json"):
        places.journal.with_name(name).unlink(missing_ok=True)
    _remove_moved(places)


def _empty(places: Places) -> None:
    with _opened(str(places.journal.parent)) as directory:
        for name in ("upper", "work"):
            with contextlib.suppress(FileNotFoundError):  # it was moved before
                _move_away(places, directory, name)


def _move_away(places: Places, parent: int, name: str) -> None:
    """Move a directory of the upper one where nobody takes what is left of it for a change."""
    moved = places.journal.with_name("removed")
    moved.mkdir(0o700, exist_ok=True)
    with _opened(str(moved)) as target:
        allow_owner(parent, os.fsencode(name), stat.S_IRWXU)
        os.rename(name, os.urandom(8).hex(), src_dir_fd=parent, dst_dir_fd=target)


def _remove_moved(places: Places) -> None:
    moved = places.journal.with_name("removed")
    with contextlib.suppress(FileNotFoundError):
        with _opened(str(moved)) as directory:
            _clear(directory)
        moved.rmdir()


def _settle(places: Places, journal: Journal) -> None:
    """Take the settled paths out of the upper directory, and the directories that are empty then."""
    for path in journal.whiteouts:
        _make_whiteout(places.upper, os.fsdecode(path))
    for path in journal.opaque:
        with contextlib.suppress(OSError), _opened(os.fsdecode(path), places.upper) as directory:
            os.removexattr(directory, OPAQUE)
    for path in reversed(journal.settled):  # a directory comes after its content
        _remove_entry(places, os.fsdecode(path), with_all=journal.is_discard)


def _make_whiteout(upper: int, path: str) -> None:
    above, _, name = path.rpartition("/")
    with _opened(above, upper) as parent, contextlib.suppress(FileExistsError):
        os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)


def _remove_entry(places: Places, path: str, *, with_all: bool) -> None:
    """Remove an entry of the upper directory, if it is there, and directories that have become empty.

    Of a directory `with_all` removes what lies beneath it, too; else only an empty one is removed.
    """
    above, _, name = path.rpartition("/")
    with contextlib.suppress(FileNotFoundError), _opened(above, places.upper) as parent:
        try:
            os.unlink(name, dir_fd=parent)
        except IsADirectoryError:
            if with_all:
                _move_away(places, parent, name)
            else:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
    while above:
        above, _, name = above.rpartition("/")
        try:
            with _opened(above, places.upper) as parent:
                os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            continue
        except OSError:  # it is not empty
            return

"""The upper directory of an overlay (overlayfs), compared with the project below it.

A program made everything in it and chose every name, so it is hostile: each directory is opened from a
descriptor, through no link and into no other file system; only regular files are opened; entries,
levels, paths and compared bytes are bounded.

overlayfs marks with a character device 0,0 (a whiteout) what was removed, and with the attribute
user.overlay.opaque a directory that hides the one of the project.
"""

import os
import stat
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from ....policies.errors import WorkspaceError
from ....runner.kernel.file_calls import allow_owner, open_beneath

OPAQUE = "user.overlay.opaque"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NOT_CONTENT = ("user.overlay.redirect", "user.overlay.metacopy")  # content that lies elsewhere
_MOST_ENTRIES = 500_000
_MOST_LEVELS = 128
_MOST_PATH_BYTES = 4000  # PATH_MAX is 4,096
_COMPARED_BYTES = 1 << 30  # a file beyond them counts as changed
_CHUNK = 1 << 20

Kind = Literal["added", "changed", "removed", "replaced"]
PathType = Literal["file", "link", "directory", "other"]


class PathVersion(msgspec.Struct, frozen=True):
    """A path before or after a change; `target` is that of a link."""

    type: PathType
    size_bytes: int = 0
    executable: bool = False
    target: str = ""


class ProjectChange(msgspec.Struct, frozen=True):
    """A difference between the project and the view of a command: a path relative to the root, which
    was added, changed, removed, or replaced by another type.

    Directories are named only if they are empty, removed or replaced.  `left_out`: why it is not
    applied; empty if it is.
    """

    path: str
    kind: Kind
    before: PathVersion | None
    after: PathVersion | None
    left_out: str = ""


class Difference(NamedTuple):
    """A change, and what applying it needs.

    `top`: the uppermost directory on the path that the project does not have, or the path itself.
    `opaque`: the directory whose attribute hides the project's one; None if none does.  `has_entry`:
    the upper directory has something at the path.  `mode`: as the project has it, 0 if it has not.
    `blocks`: bytes that it takes on the disk.  `state`: inode and ctime of the entry, which no program
    can set, so an entry that was changed has another one.
    """

    change: ProjectChange
    top: str
    opaque: str | None
    has_entry: bool
    mode: int = 0
    blocks: int = 0
    state: tuple[int, int] = (0, 0)


class _UpperDirectory(NamedTuple):
    """A directory of the upper one; `top` as in Difference, None if the project has it."""

    path: str
    levels: int
    top: str | None
    opaque: str | None


class Comparison:
    """Compares the open directory `upper` with the open directory `project`; iterate over it once.

    Raises WorkspaceError beyond the bounds, and OSError.
    """

    def __init__(self, upper: int, project: int) -> None:
        self._upper, self._project = upper, project
        self._entries, self._compared = 0, 0
        self._waiting = [_UpperDirectory("", 0, None, None)]

    def __iter__(self) -> Iterator[Difference]:
        while self._waiting:
            at = self._waiting.pop()
            try:
                upper = open_directory(self._upper, at.path, allow=True)
            except OSError as error:
                yield self._unreadable(at, error)
                continue
            try:
                project = open_directory(self._project, at.path) if at.top is None else -1
            except OSError as error:  # another file system, or the right to read it
                os.close(upper)
                yield self._unreadable(at, error)
                continue
            try:
                yield from self._directory(at, upper, project)
            finally:
                os.close(upper)
                if project >= 0:
                    os.close(project)

    def _unreadable(self, at: _UpperDirectory, error: OSError) -> Difference:
        version = PathVersion("directory")
        why = f"cannot read the directory: {error.strerror}"
        change = ProjectChange(at.path, "changed", version, version, why)
        return Difference(change, at.top or at.path, at.opaque, True)

    def _directory(self, at: _UpperDirectory, upper: int, project: int) -> Iterator[Difference]:
        if (mode := os.fstat(upper).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(upper, stat.S_IMODE(mode) | stat.S_IRWXU)
        if at.opaque is None and _attribute(upper, OPAQUE) == b"y":
            at = at._replace(opaque=at.path)
        names = os.listdir(upper)
        self._count(len(names))
        below = []
        for name in sorted(names):
            path = f"{at.path}/{name}" if at.path else name
            after = os.stat(name, dir_fd=upper, follow_symlinks=False)
            if stat.S_ISREG(after.st_mode) and not after.st_mode & stat.S_IRUSR:
                allow_owner(upper, os.fsencode(name), stat.S_IRUSR)  # before its ctime is told
                after = os.stat(name, dir_fd=upper, follow_symlinks=False)
            before = _stat(project, name)
            found = self._difference(path, at, (upper, project), name, before, after)
            if stat.S_ISDIR(after.st_mode):
                has_directory = before is not None and stat.S_ISDIR(before.st_mode)
                top = at.top if at.top is not None else None if has_directory else path
                if at.levels < _MOST_LEVELS:
                    below.append(_UpperDirectory(path, at.levels + 1, top, at.opaque))
                elif found is None:
                    found = self._left_out(path, at, f"more than {_MOST_LEVELS} levels")
            if found is not None:
                yield found
        self._waiting += reversed(below)
        if at.opaque is not None and project >= 0:
            hidden = set(os.listdir(project)).difference(names)
            self._count(len(hidden))
            for name in sorted(hidden):
                path = f"{at.path}/{name}" if at.path else name
                if before := _stat(project, name):
                    yield _removed(path, before, _version(project, name, before), at, False)

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > _MOST_ENTRIES:
            raise WorkspaceError(
                f"the changes have more than {_MOST_ENTRIES} entries",
                "discard them: cellwright changes discard",
            )

    def _difference(
        self, path: str, at: _UpperDirectory, directories: tuple[int, int], name: str,
        before: os.stat_result | None, after: os.stat_result,
    ) -> Difference | None:  # fmt: skip
        """Return how an entry of the upper directory differs; None if it does not, or is a directory
        that holds what does."""
        upper, project = directories
        was = _version(project, name, before) if before else None
        if stat.S_ISCHR(after.st_mode) and after.st_rdev == 0:
            return _removed(path, before, was, at, True) if before and was else None
        now = _version(upper, name, after)
        if now.type == "directory" and (
            was.type == "directory" if was else not _is_empty(upper, name)
        ):
            return None
        kind: Kind = "added" if was is None else "changed" if was.type == now.type else "replaced"
        if kind == "changed" and was == now and self._is_same(directories, name, now):
            return None
        why = "devices, sockets and pipes are never applied" if now.type == "other" else ""
        if len(os.fsencode(path)) > _MOST_PATH_BYTES:
            why = f"a path of more than {_MOST_PATH_BYTES} bytes"
        mode = before.st_mode if before else 0
        change = ProjectChange(path, kind, was, now, why)
        top = path if at.top is None else at.top
        state = after.st_ino, after.st_ctime_ns
        return Difference(change, top, at.opaque, True, mode, after.st_blocks * 512, state)

    def _left_out(self, path: str, at: _UpperDirectory, why: str) -> Difference:
        change = ProjectChange(path, "added", None, PathVersion("directory"), why)
        return Difference(change, at.top or path, at.opaque, True)

    def _is_same(self, directories: tuple[int, int], name: str, version: PathVersion) -> bool:
        """Tell whether two entries of the same type, size and executable bit have the same content."""
        if version.type != "file":
            return version.type == "link"  # the targets are the same
        if self._compared + version.size_bytes > _COMPARED_BYTES:
            return False
        self._compared += version.size_bytes
        files: list[int] = []
        try:
            files.append(open_file(directories[0], name, allow=True))
            files.append(open_file(directories[1], name))
            while True:
                one, other = (os.read(file, _CHUNK) for file in files)
                if one != other:
                    return False
                if not one:
                    return True
        except OSError:
            return False
        finally:
            for file in files:
                os.close(file)


def open_directory(root: int, path: str, *, allow: bool = False) -> int:
    """Open a directory beneath `root`, through no link; with `allow` let its owner do so first if the
    mode forbids that.  Raises OSError."""
    return _opened(root, path, DIRECTORY, stat.S_IRWXU if allow else 0)


def open_file(root: int, path: str, *, allow: bool = False) -> int:
    """Open a regular file beneath `root`, with all of its content, as `open_directory` does."""
    file = _opened(root, path, _FILE, stat.S_IRUSR if allow else 0)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(0, "it is not a regular file")
        for each in _NOT_CONTENT:
            if _attribute(file, each) is not None:
                raise OSError(0, f"its content lies elsewhere ({each})")
    except BaseException:
        os.close(file)
        raise
    return file


def _opened(root: int, path: str, flags: int, allowed: int) -> int:
    name = os.fsencode(path) or b"."
    try:
        return open_beneath(root, name, flags)
    except PermissionError:
        if not allowed:
            raise
        allow_owner(root, name, allowed)
        return open_beneath(root, name, flags)


def _removed(
    path: str, before: os.stat_result, version: PathVersion, at: _UpperDirectory, has_entry: bool
) -> Difference:
    change = ProjectChange(path, "removed", version, None)
    return Difference(change, path, at.opaque, has_entry, before.st_mode)


def _attribute(file: int, name: str) -> bytes | None:
    try:
        return os.getxattr(file, name)
    except OSError:  # it has none
        return None


def _stat(directory: int, name: str) -> os.stat_result | None:
    if directory < 0:
        return None
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_empty(directory: int, name: str) -> bool:
    try:
        below = open_directory(directory, name, allow=True)
    except OSError:
        return False  # the walk reports it
    try:
        with os.scandir(below) as entries:
            return next(entries, None) is None
    finally:
        os.close(below)


def _version(directory: int, name: str, found: os.stat_result) -> PathVersion:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        return PathVersion("directory")
    if stat.S_ISLNK(mode):
        return PathVersion("link", target=os.readlink(name, dir_fd=directory))
    if stat.S_ISREG(mode):
        return PathVersion("file", found.st_size, bool(mode & stat.S_IXUSR))
    return PathVersion("other")

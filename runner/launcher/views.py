"""Directories that hold denied names, put into the root so that these do not exist or stay covered.

Linux removes a mount, in every mount namespace, when the file beneath it is replaced or removed
(rename(2), `detach_mounts`), and a name that is made later has no cover. So:

- A directory that is only read is shown entry by entry on an empty read-only memory filesystem: what
  is denied, and what is made later, does not exist there.
- A directory that may be written has to be shown as it is.  What is denied is covered, and each
  directory above a cover is mounted on itself: nobody inside can rename or remove a mount point, and so
  leave something else there for the next launcher.  From outside anybody can: the supervisor looks at
  the covers before every call (`runner/launching/covers.py`).
"""

import contextlib
import os
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ...policies.denied import Denied
from ..kernel import file_calls as files
from ..kernel import mounts
from ..kernel.steps import Now
from ..messages import Cover, Snapshot

_HARD = mounts.NOSUID | mounts.NODEV
_MOST_ENTRIES = 5000  # each entry is a mount, which every cell copies in 4 µs (measured)
_MOST_LOOKED_AT = 100_000
_MOST_OF_PROGRAMS = 1_000  # entries of program directories, in which hardly any process has pipes
_DEEPEST = 100
_MOST_PIPES = 500  # each cover is a mount too
_SIZE = {"size": "16M", "nr_inodes": str(4 * _MOST_ENTRIES)}
_ANY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ViewError(Exception):
    """There is more beneath a path than can be shown without its denied names."""


class ShownPath(NamedTuple):
    """A path that a policy shows: its open file on the host, and its place in the new root."""

    path: str
    source: str
    descriptor: int
    attributes: int
    changes: int = -1  # the open directory that gets what cells change there, if not the path


def open_source(source: str) -> int:
    """Open a host path through no link, to be shown; raises OSError that names the component."""
    try:
        return files.open_plain(os.fsencode(source), os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, _why(source) or error.strerror, f"show {source}") from None


def _why(path: str) -> str:
    """Say which component of `path` is a link or is missing; empty if none is."""
    here = ""
    for name in path.strip("/").split("/"):
        here = f"{here}/{name}"
        if os.path.islink(here):
            return f"{here} is a symbolic link by now"
        if not os.path.lexists(here):
            return f"{here} does not exist any more"
    return ""


class SinglyShown:
    """Shows directories entry by entry; `snapshots` lists the host directories that were read."""

    def __init__(self, binds: Collection[str]) -> None:
        """`binds` are the paths that are shown by themselves: those get a place, and no entries."""
        self._binds = frozenset(binds)
        self.snapshots: list[Snapshot] = []
        self._entries = 0

    def fill(self, shown: ShownPath, view: int, denied: Denied) -> None:
        """Have every entry of `shown` that is not denied in `view`, an open empty directory.

        Raises ViewError, and OSError.
        """
        self._fill(shown, shown.source, shown.descriptor, view, denied, 0)
        mounts.make_opened_read_only(view)

    def _fill(
        self, shown: ShownPath, path: str, source: int, view: int, denied: Denied, depth: int
    ) -> None:  # fmt: skip
        if depth > _DEEPEST:
            raise ViewError(f"{path} lies more than {_DEEPEST} directories beneath {shown.path}")
        status = os.fstat(source)
        self.snapshots.append(Snapshot(path, status.st_dev, status.st_ino, status.st_mtime_ns))
        for name in _names(source):
            below = denied.enter(name)
            if below is None:
                continue
            self._entries += 1
            if self._entries > _MOST_ENTRIES:
                raise ViewError(f"{shown.path} has more than {_MOST_ENTRIES} entries beneath it")
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                entry = files.open_within(source, os.fsencode(name), _ANY)
                try:
                    self._show(shown, os.path.join(path, name), entry, view, below, depth)
                finally:
                    os.close(entry)

    def _show(
        self, shown: ShownPath, path: str, entry: int, view: int, denied: Denied, depth: int
    ) -> None:  # fmt: skip
        name, mode = os.path.basename(path), os.fstat(entry).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(b"", dir_fd=entry), os.fsencode(name), dir_fd=view)
            return
        if stat.S_ISFIFO(mode):  # a listing would show the mount as a plain file (cover_pipes)
            return
        place = _make(view, name, mode)
        try:
            if shown.path + path.removeprefix(shown.source) in self._binds:
                return
            if denied and stat.S_ISDIR(mode):
                self._fill(shown, path, entry, place, denied, depth + 1)
            else:
                mount = mounts.clone_opened(entry)
                mounts.restrict(mount, shown.attributes)
                mounts.attach_opened(mount, place)
        finally:
            os.close(place)


def _names(directory: int) -> list[str]:
    """Return the names in a directory, none where we may not look: cells may not either."""
    try:
        listed = files.open_within(directory, b".", _LISTED)
    except PermissionError:
        return []
    try:
        return os.listdir(listed)
    finally:
        os.close(listed)


def _make(directory: int, name: str, mode: int) -> int:
    if stat.S_ISDIR(mode):
        os.mkdir(name, 0o755, dir_fd=directory)
        os.chmod(
            name, mode & 0o777, dir_fd=directory
        )  # the mode of a directory that is filled next
    else:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444, dir_fd=directory))
    return files.open_within(directory, os.fsencode(name), _ANY)


def guard(root: int, shown: ShownPath, denied: Denied, inner: Iterable[str]) -> list[Cover]:
    """Cover the denied paths beneath a writable directory that is in place under `root`. Pin the
    directories above them, and above the `inner` paths: paths in it that a policy shows separately.

    Raises ViewError, and OSError.
    """
    found = sorted(_denied_beneath(shown, denied)) if denied else []
    for path in sorted(
        {above for each in (*found, *inner) for above in _between(shown.path, each)}
    ):
        _pin(root, path)
    return [cover(root, path) for path in found]


def _denied_beneath(shown: ShownPath, denied: Denied) -> list[str]:
    found: list[str] = []
    looked_at = 0
    waiting = [(shown.path, b".", denied)]
    while waiting:
        path, relative, here = waiting.pop()
        try:
            directory = files.open_within(shown.descriptor, relative, _ANY)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            names = here.names
            for name in _names(directory) if names is None else sorted(names):
                looked_at += 1
                if looked_at > _MOST_LOOKED_AT:
                    raise ViewError(
                        f"{shown.path} has more than {_MOST_LOOKED_AT} entries beneath it"
                    )
                below = here.enter(name)
                if below is None:
                    if _exists(directory, name):
                        found.append(os.path.join(path, name))
                elif below and _is_directory(directory, name):
                    under = os.path.join(relative, os.fsencode(name))
                    waiting.append((os.path.join(path, name), under, below))
        finally:
            os.close(directory)
    return found


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_directory(directory: int, name: str) -> bool:
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(status.st_mode)


def _between(top: str, path: str) -> Iterator[str]:
    while (path := os.path.dirname(path)) != top:
        yield path


def _pin(root: int, path: str) -> None:
    """Mount a directory on itself: nobody in a cell can rename or remove a mount point (EBUSY)."""
    place = files.open_within(root, os.fsencode(path.lstrip("/")), _ANY)
    try:
        mounts.attach_opened(mounts.clone_opened(place), place)
    finally:
        os.close(place)


def cover(root: int, path: str) -> Cover:
    """Put an empty directory on a directory of the new root, and on anything else a device that cannot
    be opened (nodev)."""
    place = files.open_within(root, os.fsencode(path.lstrip("/")), _ANY)
    try:
        if stat.S_ISDIR(os.fstat(place).st_mode):
            mount = mounts.new(Now(), "tmpfs", _HARD | mounts.RDONLY, size="4k", mode="0555")
        else:
            mount = mounts.clone(Now(), "/dev/null")
            mounts.restrict(mount, _HARD | mounts.NOEXEC | mounts.RDONLY)
        status = os.fstat(mount)
        mounts.attach_opened(mount, place)
    finally:
        os.close(place)
    return Cover(path, status.st_dev, status.st_ino)


def cover_pipes(root: int, path: str, *, of_programs: bool) -> None:
    """Cover the named pipes beneath a read-only directory. A read-only mount stops neither writing to a
    pipe nor reading its data. Landlock does not either below /tmp and below writable directories, whose
    rules hold for everything inside.

    A limited number of entries is looked at, those nearest to `path` first; fewer in a directory
    `of_programs`, since a toolchain may have 100,000.  Raises ViewError, OSError.
    """
    waiting, looked_at, covered = deque([path]), 0, 0
    most = _MOST_OF_PROGRAMS if of_programs else _MOST_LOOKED_AT
    while waiting and looked_at < most:
        above = waiting.popleft()
        try:
            found = _listed(root, above, most - looked_at)
        except OSError:  # removed, not readable (nor in cells), or on a file system that hangs
            continue
        looked_at += len(found)
        waiting.extend(f"{above}/{name}" for name, mode in found if stat.S_ISDIR(mode))
        pipes = [f"{above}/{name}" for name, mode in found if stat.S_ISFIFO(mode)]
        covered += len(pipes)
        if covered > _MOST_PIPES:
            raise ViewError(f"{path} has more than {_MOST_PIPES} named pipes beneath it")
        for each in pipes:
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                cover(root, each)


def _listed(root: int, path: str, most: int) -> list[tuple[str, int]]:
    """Return `most` names in a directory of the new root, with the kind of each; 0 of plain files and
    links, which take no call."""
    directory = files.open_within(root, os.fsencode(path.lstrip("/")), _LISTED)
    try:
        with os.scandir(directory) as entries:
            return [(each.name, _kind(each)) for each in islice(entries, most)]
    finally:
        os.close(directory)


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return 0
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0


def new_view(shown: ShownPath) -> int:
    """Return a detached memory filesystem for a directory that is shown entry by entry."""
    mode = f"{os.fstat(shown.descriptor).st_mode & 0o777:o}"
    return mounts.new(Now(), "tmpfs", shown.attributes & ~mounts.RDONLY, mode=mode, **_SIZE)

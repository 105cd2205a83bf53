"""`content_of_paths`: files and folders of the host, read for a call.

A folder may change while it is read, and a program that the folder is shown to may change it.  So each
file is found once, from a descriptor of the folder and through no link that leads out of it, and is
read only if it is a regular file: to open a device can already do something.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...policies.errors import PolicyError
from ...policies.policy import MIB
from ...runner.kernel.files import open_inside, open_within
from ...runner.workspace import MOST_LEVELS, Executable
from .checks import MAX_FILES

_MOST_BYTES = 1024 * MIB  # whatever the workspace holds: it is read into memory
_PIECE = MIB
_FIND = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def content_of_paths(
    files: Mapping[str, str | bytes | os.PathLike[str]],
) -> dict[str, str | bytes]:
    """Return `files` with the content of the host's files in place of their paths.

    A folder becomes all files below it, with their paths; below the name "." they keep only these.
    Raises PolicyError for a file that cannot be read, and for what is neither file nor folder.
    """
    host_files = _HostFiles()
    for name, given in files.items():
        if isinstance(given, os.PathLike):
            host_files.read(name, Path(given))
        else:
            host_files.add(name, given)
    return host_files.found


class _HostFiles:
    """Reads files into `found`, within the bounds of all together."""

    def __init__(self) -> None:
        self.found: dict[str, str | bytes] = {}
        self._left = _MOST_BYTES
        self._entries = 0

    def read(self, name: str, path: Path) -> None:
        """Read the file at `path`, or those below it."""
        try:
            place = os.open(path, _FIND)
            try:
                if stat.S_ISDIR(os.fstat(place).st_mode):
                    self._read_folder(name, path, place)
                else:
                    self.add(name, self._content(name, path, place))
            finally:
                os.close(place)
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else path
            raise PolicyError(f"files: cannot read {where}: {error.strerror}") from None

    def add(self, name: str, content: str | bytes) -> None:
        if name in self.found:
            raise PolicyError(f"files: {name!r} is given twice")
        self._count(name, len(content))
        self.found[name] = content

    def _count(self, name: str, size: int) -> None:
        """Count an entry of `size` bytes; raises PolicyError if it is one too many."""
        self._entries += 1
        self._left -= size
        if self._entries > MAX_FILES or self._left < 0:
            raise PolicyError(
                f"files: more than {MAX_FILES} files or {_MOST_BYTES} bytes, at {name!r}",
                "name what the program needs, or show the folder in filesystem.read of a policy",
            )

    def _read_folder(self, name: str, folder: Path, top: int) -> None:
        prefix = "" if name == "." else f"{name}/"
        waiting = ["."]
        while waiting:
            below = waiting.pop()
            for path, is_folder in _entries(top, folder, below):
                if not is_folder:
                    self._read_entry(prefix + path, folder, top, path)
                    continue
                self._count(prefix + path, 0)
                if path.count("/") >= MOST_LEVELS:
                    raise PolicyError(f"files: {folder}: more than {MOST_LEVELS} levels of folders")
                waiting.append(path)

    def _read_entry(self, name: str, folder: Path, top: int, path: str) -> None:
        try:
            place = open_inside(top, os.fsencode(path), _FIND)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP, errno.ENOENT):
                raise _leads_out(folder, path) from None
            raise OSError(error.errno, error.strerror, str(folder / path)) from None
        try:
            if stat.S_ISDIR(os.fstat(place).st_mode):
                raise _leads_out(folder, path)
            self.add(name, self._content(name, folder / path, place))
        finally:
            os.close(place)

    def _content(self, name: str, path: Path, place: int) -> bytes:
        """Return the content of a regular file that was found, as an Executable if it is one."""
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode):
            raise PolicyError(f"files: {path} is neither a file nor a folder")
        if found.st_size > self._left:
            self._count(name, found.st_size)  # raises the error
        try:
            descriptor = os.open(f"/proc/self/fd/{place}", _READ)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            content = _read_all(descriptor, self._left)
        finally:
            os.close(descriptor)
        return Executable(content) if found.st_mode & stat.S_IXUSR else content


def _read_all(descriptor: int, most: int) -> bytes:
    """Return the content, of which one byte more than `most` is enough to be refused."""
    pieces, left = [], most + 1
    while left > 0 and (piece := os.read(descriptor, min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _entries(top: int, folder: Path, below: str) -> Iterator[tuple[str, bool]]:
    """Yield the path below `folder` of each entry, in order, and whether it is a folder itself."""
    try:
        opened = open_within(top, os.fsencode(below), _LIST)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / below)) from None
    try:
        with os.scandir(opened) as scanned:
            found = []
            for entry in scanned:
                found.append((entry.name, entry.is_dir(follow_symlinks=False)))
                if len(found) > MAX_FILES:
                    break  # the caller counts, and refuses them
    finally:
        os.close(opened)
    for entry_name, is_folder in sorted(found):
        yield entry_name if below == "." else f"{below}/{entry_name}", is_folder


def _leads_out(folder: Path, path: str) -> PolicyError:
    return PolicyError(
        f"files: {folder / path} is a link that leads out of {folder}, or to a folder",
        "pass what it leads to by a name of its own",
    )

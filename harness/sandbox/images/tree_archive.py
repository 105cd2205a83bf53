"""`TreeArchive`: a directory written as the archive of a layer (image-spec, "layer.md").

The directory may be the upper one of an overlay, whose names and content come from a guest: each entry
is opened from the descriptor of its directory and through no link, only regular files are read, and
entries, bytes, levels and seconds are bounded.
"""

import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .layer_writer import OPAQUE

_WHITEOUT, _OPAQUE_NAME = b".wh.", b".wh..wh..opq"
_NOT_CONTENT = ("user.overlay.redirect", "user.overlay.metacopy")  # content that lies elsewhere
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DEEPEST = 100  # as `LayerWriter`
_BLOCK, _PIECE = 512, 1 << 20
_END = bytes(2 * _BLOCK)
_MOST_LINKED = 200_000  # files of several names, which are remembered

Owner = Callable[[os.stat_result], tuple[int, int]]


class TreeLimits(NamedTuple):
    """The limits of an archive that is written."""

    total_bytes: int
    members: int
    seconds: float


class TreeArchive:
    """Writes the open directory `root` into the open file `out`.

    `owner`: the ids that the archive has for a file.  `is_upper`: whiteouts and opaque directories of
    an overlay are written as those of a layer.  Raises ValueError beyond the limits, OSError.
    """

    def __init__(
        self, root: int, out: int, limits: TreeLimits, owner: Owner, *, is_upper: bool
    ) -> None:
        self._root, self._out, self._owner, self._is_upper = root, out, owner, is_upper
        self._limits = limits
        self._end = time.monotonic() + limits.seconds
        self._bytes = self._members = 0
        self._linked: dict[tuple[int, int], bytes] = {}
        self.left_out = 0  # devices, pipes, sockets, and names that mean something in a layer

    def write(self) -> None:
        """Write all of it."""
        self._add_tree()
        self._put(_END)

    def _keeps(self, path: bytes, *, is_directory: bool) -> bool:
        """Tell whether the entry at a path below the root is written; for subclasses."""
        return True

    def _alter(self, member: tarfile.TarInfo) -> None:
        """Change a member before it is written; for subclasses."""

    def _add_tree(self) -> None:
        self._add(b"./", os.fstat(self._root))
        waiting = [(b"", 0)]
        while waiting:
            path, level = waiting.pop()
            directory = self._open(path)
            try:
                below = self._write_directory(path, directory)
            finally:
                os.close(directory)
            if below and level == _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} levels of directories")
            waiting += ((path + each + b"/", level + 1) for each in reversed(below))

    def _open(self, path: bytes) -> int:
        """Open a directory by its names, one after the other: a path could be longer than PATH_MAX."""
        opened = os.dup(self._root)
        for name in path.split(b"/")[:-1]:
            above = opened
            try:
                opened = os.open(name, _DIRECTORY, dir_fd=above)
            finally:
                os.close(above)
        return opened

    def _write_directory(self, path: bytes, directory: int) -> list[bytes]:
        """Write the entries of a directory; return the names of those below it."""
        if self._is_upper and path and _attribute(directory, OPAQUE) == b"y":
            self._add(path + _OPAQUE_NAME, None)
        below = []
        for name in sorted(map(os.fsencode, os.listdir(directory))):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not self._keeps(path + name, is_directory=stat.S_ISDIR(status.st_mode)):
                continue
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 and self._is_upper:
                self._add(path + _WHITEOUT + name, None)
            elif name.startswith(_WHITEOUT):
                self.left_out += 1
            elif stat.S_ISDIR(status.st_mode):
                self._add(path + name + b"/", status)
                below.append(name)
            elif stat.S_ISLNK(status.st_mode):
                self._add(path + name, status, os.fsdecode(os.readlink(name, dir_fd=directory)))
            elif stat.S_ISREG(status.st_mode):
                self._add_file(path + name, name, directory)
            else:
                self.left_out += 1
        return below

    def _add_file(self, path: bytes, name: bytes, directory: int) -> None:
        file = os.open(name, _FILE, dir_fd=directory)
        try:
            self._add_open_file(path, file)
        finally:
            os.close(file)

    def _add_open_file(self, path: bytes, file: int) -> None:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path!a} changed while it was read")
        for each in _NOT_CONTENT:
            if self._is_upper and _attribute(file, each) is not None:
                raise ValueError(f"the content of {path!a} lies elsewhere ({each})")
        identity = status.st_dev, status.st_ino
        if status.st_nlink > 1 and identity in self._linked:
            self._add(path, status, os.fsdecode(self._linked[identity]), is_hard=True)
            return
        if status.st_nlink > 1:
            if len(self._linked) == _MOST_LINKED:
                raise ValueError(f"more than {_MOST_LINKED} files of several names")
            self._linked[identity] = path
        self._count_bytes(status.st_size)
        self._add(path, status)
        for piece in content_of(file, status.st_size):
            self._put_content(piece)

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._limits.total_bytes:
            raise ValueError(f"more than {self._limits.total_bytes} bytes")

    def _add(
        self, path: bytes, status: os.stat_result | None, target: str = "", *, is_hard: bool = False
    ) -> None:
        """Write the header of a member; without a `status` it is an empty file of root."""
        member = tarfile.TarInfo(os.fsdecode(path))
        if status is not None:
            member.mode = stat.S_IMODE(status.st_mode)
            member.uid, member.gid = self._owner(status)
            member.mtime = max(int(status.st_mtime), 0)
            member.linkname = target
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
            elif is_hard:
                member.type = tarfile.LNKTYPE
            elif stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
            else:
                member.size = status.st_size
        self._add_member(member)

    def _add_member(self, member: tarfile.TarInfo) -> None:
        self._members += 1
        if self._members > self._limits.members:
            raise ValueError(f"more than {self._limits.members} files")
        if time.monotonic() > self._end:
            raise ValueError(f"it takes more than {self._limits.seconds:g} seconds")
        self._alter(member)
        self._put(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _put_content(self, data: bytes) -> None:
        """Write content, or the zeros behind it; for subclasses."""
        self._put(data)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._out, view) :]


def content_of(file: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes, and zeros to the end of the block; one that became shorter has zeros."""
    left = size
    while left and (piece := os.read(file, min(left, _PIECE))):
        left -= len(piece)
        yield piece
    for _ in range(left // _PIECE):
        yield bytes(_PIECE)
    yield bytes(left % _PIECE + -size % _BLOCK)


def _attribute(file: int, name: str) -> bytes | None:
    try:
        return os.getxattr(file, name)
    except OSError:  # it has none
        return None

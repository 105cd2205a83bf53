"""`CopyArchive`: the sources of one COPY or ADD as the archive of a layer.

It is written twice: first as a digest only, which does not depend on times or on the destination, to
look for the step in the cache; then into a file.  A digest that differs the second time tells that a
source has changed meanwhile.
"""

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..images.image_sources import FileBytes
from ..images.tree_archive import TreeArchive, TreeLimits, content_of
from ..workspaces.archive import TarMember, entries

_TYPES = {"0": tarfile.REGTYPE, "1": tarfile.LNKTYPE, "2": tarfile.SYMTYPE, "5": tarfile.DIRTYPE}
MADE = 315532800  # the time of what no source has: 1980-01-01, the first that a zip file can hold
_DIRECTORY_MODE, _TEXT_MODE = 0o755, 0o644


class FileAttributes(NamedTuple):
    """The attributes of a directory that the image has.

    Its time is not kept: files are put into it, and in a cell some directories are as old as the cell.
    """

    mode: int
    uid: int
    gid: int


class Placement(NamedTuple):
    """Where the sources of a step go in the image.

    place: the path without links and without / at its start; is_directory: files go below it
    existing: path -> attributes of directories that the image has
    mode: of all files, None for their own; latest: the latest time of a file, None for any
    """

    place: str
    is_directory: bool
    existing: Mapping[str, FileAttributes]
    owner: tuple[int, int] = (0, 0)
    mode: int | None = None
    latest: int | None = None


class CopyArchive(TreeArchive):
    """Writes sources one after the other into the open file `out`; without a placement only the digest
    is made.  Raises as `TreeArchive`."""

    def __init__(
        self, limits: TreeLimits, out: int = -1, placement: Placement | None = None
    ) -> None:
        owner = placement.owner if placement else (0, 0)
        super().__init__(-1, out, limits, lambda _: owner, is_upper=False)
        self._placement = placement
        self._digest = hashlib.sha256()
        self._source = 0
        self._target = ""  # path of this source in the image
        self._leaves_out: Callable[[str, bool], bool] = lambda *_: False
        self._is_context = False
        self._withheld: dict[bytes, os.stat_result] = {}
        self.directories: list[str] = []
        if placement:
            self._add_parents(placement)

    @property
    def sources(self) -> int:
        """The number of sources so far."""
        return self._source

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def end(self) -> str:
        """Write the end, and return the digest."""
        self._put(bytes(2 * tarfile.BLOCKSIZE))
        return self.digest

    def add_directory(
        self, root: int, leaves_out: Callable[[str, bool], bool], *, is_context: bool
    ) -> None:
        """Add what is below an open directory; `leaves_out` tells by path, and whether it and all below
        it are meant, what is not copied.  `is_context`: its own mode does not count."""
        self._begin("")
        self._root, self._leaves_out, self._is_context = root, leaves_out, is_context
        self._linked.clear()
        self._add_tree()
        self._withheld.clear()

    def add_file(self, file: int, name: str) -> None:
        self._begin(name)
        self._linked.clear()
        self._add_open_file(b"", file)

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        self._begin(name)
        member = tarfile.TarInfo("")
        member.size, member.mtime, member.mode = len(data), MADE, _TEXT_MODE
        self._count_bytes(len(data))
        self._add_member(member)
        self._put_content(data + bytes(-len(data) % tarfile.BLOCKSIZE))

    def add_members(self, archive: int) -> None:
        """Add the sources in the archive that a cell has made (`image_files.py`); it may be hostile."""
        for source, path, is_directory, each in _members(archive, self._limits.members):
            if source != self._source:
                self._begin("" if is_directory else path)
                self._source = source
            member = tarfile.TarInfo(path if is_directory else "")
            member.type = _TYPES[each.kind]
            member.mode, member.mtime, member.linkname = each.mode, each.modified, each.target
            member.uid, member.gid = self._owner(os.stat_result([0] * 10))
            member.size = each.size if each.is_regular else 0
            self._count_bytes(member.size)
            self._add_member(member)
            if each.is_regular:
                os.lseek(archive, each.start, os.SEEK_SET)
                for piece in content_of(archive, each.size):
                    self._put_content(piece)

    def _begin(self, name: str) -> None:
        """Begin a source: a file of this name, or without one a directory."""
        self._source += 1
        self._digest.update(repr((self._source, name)).encode(errors="surrogateescape"))
        self._target = ""
        if self._placement:
            place = self._placement.place
            into = name if self._placement.is_directory else ""
            self._target = "/".join(filter(None, (place, into)))

    def _add_parents(self, placement: Placement) -> None:
        names = placement.place.split("/") if placement.place else []
        count = len(names) + (1 if placement.is_directory else 0)
        for path in ("/".join(names[:number]) for number in range(count)):
            member = tarfile.TarInfo(f"./{path}")
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, _DIRECTORY_MODE, MADE
            member.uid, member.gid = placement.owner
            self._describe(member, path)
            self._put(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _describe(self, member: tarfile.TarInfo, path: str) -> None:
        """Give a directory that the image has its attributes there, and others those of the step."""
        assert self._placement  # noqa: S101 - the caller has looked
        known = self._placement.existing.get(path)
        if member.isdir() and known:
            member.mode, member.uid, member.gid = known
            member.mtime = MADE
        if self._placement.latest is not None:
            member.mtime = min(int(member.mtime), self._placement.latest)

    def _keeps(self, path: bytes, *, is_directory: bool) -> bool:
        return not self._leaves_out(os.fsdecode(path), is_directory)

    def _add(
        self, path: bytes, status: os.stat_result | None, target: str = "", *, is_hard: bool = False
    ) -> None:
        """Write a member, and before it the directories above that only an exception keeps."""
        assert status  # noqa: S101 - only overlays have others
        is_below = stat.S_ISDIR(status.st_mode) and path not in (b"", b"./")
        if is_below and self._leaves_out(os.fsdecode(path[:-1]), False):
            self._withheld[path] = status
            return
        for above in _above(path):
            if kept := self._withheld.pop(above, None):
                super()._add(above, kept)
        super()._add(path, status, target, is_hard=is_hard)

    def _alter(self, member: tarfile.TarInfo) -> None:
        path = member.name.strip("/") if member.isdir() else member.name
        path = "" if path == "." else path
        if member.isdir() and not path and self._is_context:
            member.mode = _DIRECTORY_MODE
        told = (path, member.type, member.mode, member.size, member.linkname)
        self._digest.update(repr(told).encode(errors="surrogateescape"))
        if member.isdir():
            self.directories.append(path)
        if self._placement is None:
            return
        member.name = "/".join(filter(None, (self._target, path))) or "./"
        if member.islnk():
            member.linkname = "/".join(filter(None, (self._target, member.linkname)))
        if self._placement.mode is not None and not member.issym():
            member.mode = self._placement.mode
        self._describe(member, member.name.removeprefix("./"))

    def _put_content(self, data: bytes) -> None:
        self._digest.update(data)
        self._put(data)

    def _put(self, data: bytes) -> None:
        if self._placement:
            super()._put(data)


def _above(path: bytes) -> Iterator[bytes]:
    names = path.rstrip(b"/").split(b"/")
    for count in range(1, len(names)):
        yield b"/".join(names[:count]) + b"/"


def _members(archive: int, most: int) -> Iterator[tuple[int, str, bool, TarMember]]:
    """Yield (number of the source, path in it, whether the source is a directory, member)."""
    for each in entries(FileBytes(archive), most, "surrogateescape"):
        number, _, rest = each.name.rstrip("/").partition("/")
        kind, _, path = rest.partition("/")
        if not number.isdigit() or kind not in ("d", "f") or each.kind not in _TYPES:
            raise ValueError(f"the cell sent an unexpected file, {each.name!a}")
        if each.kind == "1":  # the target has the same beginning
            each = each._replace(target=each.target.partition("/")[2].partition("/")[2])
        yield int(number) + 1, path, kind == "d", each

"""Conversion of the files below /workspace into a tar archive, and back.

An archive holds the name, content and executable bit of each file, nothing else, so that the same
files always make the same archive.

An archive to read may be hostile, and tarfile is not made for that: a few bytes keep it busy forever,
make it recurse, or expand to gigabytes (CVE-2024-6232, CVE-2025-8194, sparse members).  So this module
parses headers itself: each once, forward only, and uses only type, name, mode and size (tar(5)).

`content_of_paths`: files and folders of the host, read for a call.

A folder may change while it is read, and a program that the folder is shown to may change it.  So each
file is found once, from a descriptor of the folder and through no link that leads out of it, and is
read only if it is a regular file: to open a device can already do something.
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ....policies.errors import PolicyError, WorkspaceError
from ....policies.policy import MIB
from ....runner.cells.workspace import MOST_LEVELS, Executable, content_of, list_files, room
from ....runner.kernel.file_calls import open_inside, open_within
from ..checks import MAX_FILES

_BLOCK = 512
_MODE, _EXECUTABLE = 0o644, 0o755
_MOST_MEMBERS = 100_000
_REGULAR = b"0\0" + b"7"
_MOST_HEADER_BYTES = 1 << 20  # bytes of a header about the next member
_ABOUT_THE_NEXT = b"xLK"  # pax and GNU headers for long or non-ASCII names and link targets
_NAMED_BY_GNU = {b"L": b"path", b"K": b"linkpath"}
_IGNORED = b"g"  # pax: a header for all files
# Other records are not kept: headers without end could fill the memory with them.
_USED = frozenset((b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"))
_SPARSE = b"GNU.sparse."
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class TarMember(NamedTuple):
    """A member of an archive; `kind` is its type flag (tar(5)), "0" of a regular file.  Its content is
    `size` bytes of the archive from `start` on."""

    kind: str
    name: str
    target: str  # target of a link
    mode: int
    start: int
    size: int
    uid: int = 0
    gid: int = 0
    modified: int = 0  # seconds since the epoch

    @property
    def is_regular(self) -> bool:
        return self.kind == "0"


class ArchiveBytes(Protocol):
    """The bytes of an archive, read only in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


def files_of(workspace: int) -> dict[str, bytes]:
    """Return every regular file, but for those that changed meanwhile.

    Raises WorkspaceError if files claim more than the workspace holds.
    """
    left = most = room(workspace)
    found = {}
    for path, seen in list_files(workspace).items():
        left -= seen.size_bytes
        if left < 0:
            raise WorkspaceError(
                f"the files claim more than the {most} bytes that the workspace holds: "
                "some are sparse, or are there by several names"
            )
        with contextlib.suppress(WorkspaceError):
            found[path] = content_of(workspace, path, seen)
    return found


def pack(files: Mapping[str, bytes]) -> bytes:
    import tarfile  # imports every kind of compression

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = _EXECUTABLE if isinstance(content, Executable) else _MODE
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the regular files of an uncompressed archive; if a name occurs twice, the last one counts.

    Nothing is written, and names are not checked: the caller does that before it writes them.  Raises
    PolicyError for a malformed archive.
    """
    if not isinstance(data, bytes):
        raise PolicyError(f"archive: must be bytes, got {type(data).__name__}")
    try:
        if not data or data.startswith(_COMPRESSED):
            raise ValueError("it is compressed" if data else "it is empty")
        found: dict[str, bytes] = {}
        for each in entries(data):
            if each.is_regular:
                content = data[each.start : each.start + each.size]
                found[each.name] = Executable(content) if each.mode & stat.S_IXUSR else content
        return found
    except ValueError as error:  # also an invalid number, or a name that is not UTF-8
        raise PolicyError(f"not a tar archive: {str(error)[:200]}") from None


def entries(
    data: ArchiveBytes, most: int = _MOST_MEMBERS, errors: str = "strict"
) -> Iterator[TarMember]:
    """Yield the members of an uncompressed archive, `most` at most.

    Names and targets are not checked; `errors` is for those that are not UTF-8, as in bytes.decode.
    Bytes are asked for in their order.  Raises ValueError for a malformed archive.
    """
    told: dict[bytes, bytes] = {}  # fields of the next member from its preceding headers
    for kind, name, header, start, size in _members(data, told, most):
        if kind in _ABOUT_THE_NEXT:
            content = data[start : start + size]
            found = {_NAMED_BY_GNU[kind]: content.partition(b"\0")[0]} if kind != b"x" else {}
            told |= found or _records(content)
            if sparse := [key for key in told if key.startswith(_SPARSE)]:
                raise ValueError(f"it holds a sparse file ({sparse[0].decode(errors=errors)})")
            continue
        if kind in _IGNORED:
            continue
        target = told.get(b"linkpath", header[157:257].partition(b"\0")[0])
        if kind in _REGULAR:  # a directory in archives older than POSIX has a name that ends so
            kind = b"5" if name.endswith(b"/") else b"0"
        numbers = [
            int(told[key].partition(b".")[0] or b"0") if key in told else _number(header[at:end])
            for key, at, end in ((b"uid", 108, 116), (b"gid", 116, 124), (b"mtime", 136, 148))
        ]
        texts = kind.decode("latin-1"), name.decode(errors=errors), target.decode(errors=errors)
        yield TarMember(*texts, _number(header[100:108]), start, size, *numbers)
        told.clear()


_Parts = tuple[bytes, bytes, bytes, int, int]


def _members(data: ArchiveBytes, told: dict[bytes, bytes], most: int) -> Iterator[_Parts]:
    """Yield (type, name, header, start, size) of each member; `told` has the fields that headers
    before it gave."""
    position = members = 0
    while (header := data[position : position + _BLOCK]).strip(b"\0"):
        members += 1
        if members > most:
            raise ValueError(f"more than {most} members")
        kind, name, size = _header(header)
        if kind not in _ABOUT_THE_NEXT:
            name, size = told.get(b"path", name), int(told.get(b"size", size))
        position += _BLOCK
        if not 0 <= size <= len(data) - position:
            raise ValueError(f"it ends in the middle of {ascii(name)[1:200]}")
        if kind in _ABOUT_THE_NEXT and size > _MOST_HEADER_BYTES:
            raise ValueError(f"a header has {size} bytes, more than {_MOST_HEADER_BYTES}")
        yield kind, name, header, position, size
        position += -(-size // _BLOCK) * _BLOCK


def _header(header: bytes) -> tuple[bytes, bytes, int]:
    if len(header) < _BLOCK or _number(header[148:156]) != sum(header, 8 * 32) - sum(
        header[148:156]
    ):
        raise ValueError("its checksum is wrong")
    kind, name = header[156:157], header[:100].partition(b"\0")[0]
    if kind == b"S":
        raise ValueError("it holds a sparse file")
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return kind, name, _number(header[124:136])


def _number(field: bytes) -> int:
    """Return an octal number, or one of base 256 as GNU writes large ones (tar(5))."""
    if field[0] & 0x80:
        is_negative = field[0] == 0xFF
        number = int.from_bytes(field, "big", signed=is_negative)
        return number if is_negative else number - (0x80 << 8 * (len(field) - 1))
    return int(field.strip(b" \0") or b"0", 8)


def _records(content: bytes) -> dict[bytes, bytes]:
    """Return the used records of a pax header, "LENGTH KEY=VALUE\\n"; LENGTH counts all of a record."""
    records = {}
    position = 0
    while position < len(content):
        space = content.index(b" ", position, position + 12)
        end = position + int(content[position:space])
        if not space < end <= len(content):
            raise ValueError("a pax record is longer than its header")
        key, _, value = content[space + 1 : end - 1].partition(b"=")
        if key in _USED or key.startswith(_SPARSE):
            records[key] = value
        position = end
    return records


_MOST_BYTES = 1024 * MIB  # limit independent of the workspace, because folders are read into memory
_PIECE = MIB
_FIND = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def content_of_paths(
    files: Mapping[str, str | bytes | os.PathLike[str]],
) -> dict[str, str | bytes]:
    """Return `files` with the content of the host's files in place of their paths.

    A folder becomes all files below it, with their paths; below the name "." they keep only these.
    Raises PolicyError for an unreadable file, and for anything but a file or folder.
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
    """Return the content; at most one byte more than `most`, which is enough to refuse it."""
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
                    break  # the caller counts and refuses the rest
    finally:
        os.close(opened)
    for entry_name, is_folder in sorted(found):
        yield entry_name if below == "." else f"{below}/{entry_name}", is_folder


def _leads_out(folder: Path, path: str) -> PolicyError:
    return PolicyError(
        f"files: {folder / path} is a link that leads out of {folder}, or to a folder",
        "pass what it leads to by a name of its own",
    )

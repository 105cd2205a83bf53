"""Conversion of the files below /workspace into a tar archive, and back.

An archive holds the name, content and executable bit of each file, nothing else, so that the same
files always make the same archive.

An archive to read may be hostile, and tarfile is not made for that: a few bytes keep it busy forever,
make it recurse, or expand to gigabytes (CVE-2024-6232, CVE-2025-8194, sparse members).  So this module
parses headers itself: each once, forward only, and uses only type, name, mode and size (tar(5)).
"""

import contextlib
import io
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from ...policies.errors import PolicyError, WorkspaceError
from ...runner.workspace import Executable, content_of, list_files, room

_BLOCK = 512
_MODE, _EXECUTABLE = 0o644, 0o755
_MOST_MEMBERS = 100_000
_REGULAR = b"0\0" + b"7"
_MOST_HEADER_BYTES = 1 << 20  # of one header about the next member
_ABOUT_THE_NEXT = b"xLK"  # pax and GNU: a name, or the target of a link, that is long or not ASCII
_NAMED_BY_GNU = {b"L": b"path", b"K": b"linkpath"}
_IGNORED = b"g"  # pax: a header for all files
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class TarMember(NamedTuple):
    """A member of an archive; `kind` is its type flag (tar(5)), "0" of a regular file.  Its content is
    `size` bytes of the archive from `start` on."""

    kind: str
    name: str
    target: str  # of a link
    mode: int
    start: int
    size: int

    @property
    def is_regular(self) -> bool:
        return self.kind == "0"


class ArchiveBytes(Protocol):
    """The bytes of an archive, of which only slices are taken."""

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


def entries(data: ArchiveBytes, most: int = _MOST_MEMBERS) -> Iterator[TarMember]:
    """Yield the members of an uncompressed archive, `most` at most.

    Names and targets are not checked.  Raises ValueError for a malformed archive.
    """
    told: dict[bytes, bytes] = {}  # fields for the next member, from the headers before it
    for kind, name, target, mode, start, size in _members(data, told, most):
        if kind in _ABOUT_THE_NEXT:
            content = data[start : start + size]
            found = {_NAMED_BY_GNU[kind]: content.partition(b"\0")[0]} if kind != b"x" else {}
            told |= found or _records(content)
            if sparse := [key for key in told if key.startswith(b"GNU.sparse.")]:
                raise ValueError(f"it holds a sparse file ({_text(sparse[0])})")
            continue
        if kind in _IGNORED:
            continue
        target = told.get(b"linkpath", target)
        if kind in _REGULAR:  # a directory in archives older than POSIX has a name that ends so
            kind = b"5" if name.endswith(b"/") else b"0"
        yield TarMember(kind.decode("latin-1"), _text(name), _text(target), mode, start, size)
        told.clear()


_Parts = tuple[bytes, bytes, bytes, int, int, int]


def _members(data: ArchiveBytes, told: dict[bytes, bytes], most: int) -> Iterator[_Parts]:
    """Yield (type, name, target, mode, start, size) of each member; `told` has the fields that headers
    before it gave."""
    position = members = 0
    while (header := data[position : position + _BLOCK]).strip(b"\0"):
        members += 1
        if members > most:
            raise ValueError(f"more than {most} members")
        kind, name, mode, size = _header(header)
        if kind not in _ABOUT_THE_NEXT:
            name, size = told.get(b"path", name), int(told.get(b"size", size))
        position += _BLOCK
        if not 0 <= size <= len(data) - position:
            raise ValueError(f"it ends in the middle of {_text(name)!r}")
        if kind in _ABOUT_THE_NEXT and size > _MOST_HEADER_BYTES:
            raise ValueError(f"a header has {size} bytes, more than {_MOST_HEADER_BYTES}")
        yield kind, name, header[157:257].partition(b"\0")[0], mode, position, size
        position += -(-size // _BLOCK) * _BLOCK


def _header(header: bytes) -> tuple[bytes, bytes, int, int]:
    if len(header) < _BLOCK or _octal(header[148:156]) != sum(header, 8 * 32) - sum(
        header[148:156]
    ):
        raise ValueError("its checksum is wrong")
    kind, name = header[156:157], header[:100].partition(b"\0")[0]
    if kind == b"S":
        raise ValueError("it holds a sparse file")
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return kind, name, _octal(header[100:108]), _octal(header[124:136])


def _octal(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


def _records(content: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header, "LENGTH KEY=VALUE\\n"; LENGTH counts the whole record."""
    records = {}
    position = 0
    while position < len(content):
        space = content.index(b" ", position, position + 12)
        end = position + int(content[position:space])
        if not space < end <= len(content):
            raise ValueError("a pax record is longer than its header")
        key, _, value = content[space + 1 : end - 1].partition(b"=")
        records[key] = value
        position = end
    return records


def _text(name: bytes) -> str:
    return name.decode()

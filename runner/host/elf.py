"""The needs of a shared library, read from its file (elf(5)) without loading it.

The file may be hostile: its numbers are checked, and a malformed file needs nothing.
"""

import os
import struct
from typing import BinaryIO, NamedTuple

_MOST_HEADERS = 128
_MOST_DYNAMIC = 64 * 1024
_MOST_STRINGS = 16 * 1024 * 1024
_MOST_NAME = 4096
_LOAD, _DYNAMIC = 1, 2  # PT_*
_NEEDED, _STRTAB, _STRSZ, _RPATH, _RUNPATH = 1, 5, 10, 15, 29  # DT_*
_HEADER, _SEGMENT, _ENTRY = (
    struct.Struct("<16s16xQ14xHH"),
    struct.Struct("<IIQQ8xQ"),
    struct.Struct("<QQ"),
)
_NOTHING: tuple[tuple[str, ...], tuple[str, ...]] = (), ()


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Needs(NamedTuple):
    """The names of libraries that a library needs, and where it says that they are."""

    names: tuple[str, ...]
    directories: tuple[str, ...]


def needs_of(path: str | os.PathLike[str]) -> Needs:
    """Return what the 64-bit little-endian library at `path` needs; nothing if it is no such file."""
    try:
        with open(path, "rb") as file:
            return Needs(*_read(file, os.path.dirname(os.fspath(path))))
    except (OSError, ValueError, struct.error, UnicodeDecodeError):
        return Needs((), ())


def _read(file: BinaryIO, origin: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ident, table, size, count = _HEADER.unpack(file.read(_HEADER.size))
    if ident[:6] != b"\x7fELF\2\1" or size != 56 or count > _MOST_HEADERS:
        return _NOTHING
    headers = _at(file, table, size * count)
    segments = [
        _Segment(*_SEGMENT.unpack_from(headers, start)) for start in range(0, len(headers), size)
    ]
    dynamic = next((each for each in segments if each.kind == _DYNAMIC), None)
    if dynamic is None:
        return _NOTHING
    entries = list(
        _ENTRY.iter_unpack(_at(file, dynamic.offset, min(dynamic.size, _MOST_DYNAMIC) & ~15))
    )
    told = dict(entries)
    if _STRTAB not in told:
        return _NOTHING
    strings = _at(
        file, _offset_of(told[_STRTAB], segments), min(told.get(_STRSZ, 0), _MOST_STRINGS)
    )

    def named(*tags: int) -> list[str]:
        starts = [value for tag, value in entries if tag in tags]
        texts = (strings[start : start + _MOST_NAME].partition(b"\0") for start in starts)
        return [text.decode() for text, end, _ in texts if end]

    places = [place for each in named(_RPATH, _RUNPATH) for place in each.split(":") if place]
    expanded = [place.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for place in places]
    return tuple(named(_NEEDED)), tuple(map(os.path.normpath, expanded))


def _offset_of(address: int, segments: list[_Segment]) -> int:
    """Return where in the file the byte at `address` lies; raises ValueError if nowhere."""
    for each in segments:
        if each.kind == _LOAD and each.address <= address < each.address + each.size:
            return address - each.address + each.offset
    raise ValueError(address)


def _at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)

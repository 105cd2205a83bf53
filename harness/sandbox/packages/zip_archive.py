"""Zip archives of which every byte has one meaning: the strict reader of wheels, inside a cell.

This module is a part of the program of that cell (`store_directory.py` sends its text), so it imports
no module of cellwright. A zip archive may be read differently by two readers (CVE-2025-54368), name
files outside its directory (CVE-2026-1703) or unpack to far more than its size. So an archive is
refused unless its entries lie one after the other without gaps, and the directory at the end agrees
with the header of each entry.
"""

import io
import os
import re
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

END, END_BYTES = b"PK\5\6", 22  # APPNOTE.TXT 6.3.10, 4.3.16
END64, END64_BYTES = b"PK\6\6", 56  # 4.3.14
LOCATOR64, LOCATOR64_BYTES = b"PK\6\7", 20  # 4.3.15
ENTRY, ENTRY_BYTES = b"PK\1\2", 46  # 4.3.12
HEADER, HEADER_BYTES = b"PK\3\4", 30  # 4.3.7
DESCRIPTOR = b"PK\7\x08"  # 4.3.9
HAS_DESCRIPTOR, IS_UTF8 = 1 << 3, 1 << 11
COMPRESSION_LEVEL = 0b110  # tells how hard the writer tried; means nothing to a reader
STORED, DEFLATED = 0, 8
UNIX = 3
ALL_16, ALL_32 = 0xFFFF, 0xFFFFFFFF  # stands for "see the zip64 field"
MOST_NAME_BYTES, MOST_LEVELS = 1024, 40
PIECE = 1 << 20
DRIVE = re.compile(r"[A-Za-z]:")


class WheelRefused(Exception):  # noqa: N818 - what happened to the wheel
    """The wheel breaks a rule of wheels; the message names it."""


class ArchiveEntry(NamedTuple):
    name: str
    method: int
    crc: int
    packed: int
    size: int
    data: int  # offset of its bytes


class ArchiveLimits(NamedTuple):
    """The largest wheel: `unpacked` bytes in all, in so many `files`."""

    unpacked: int
    files: int


class Archive:
    """A zip archive of which every byte has one meaning; raises WheelRefused otherwise."""

    def __init__(self, file: io.BufferedReader, limits: ArchiveLimits) -> None:
        self._file = file
        self.entries = {each.name: each for each in self._listed(limits)}

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a small file; raises WheelRefused if it is missing or too long."""
        if name not in self.entries:
            raise WheelRefused(f"{name!r} is missing")
        if self.entries[name].size > most:
            raise WheelRefused(f"{name!r} is longer than {most} bytes")
        return b"".join(self.pieces(self.entries[name]))

    def pieces(self, entry: ArchiveEntry) -> Iterator[bytes]:
        """Yield the content of an entry; raises WheelRefused if its size or checksum is wrong."""
        self._file.seek(entry.data)
        left, size, crc = entry.packed, 0, 0
        inflater = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == DEFLATED else None
        while left:
            packed = self._file.read(min(left, PIECE))
            left -= len(packed)
            for piece in _inflated(inflater, packed, entry) if inflater else (packed,):
                size, crc = size + len(piece), zlib.crc32(piece, crc)
                if size > entry.size:
                    raise WheelRefused(f"{entry.name!r} unpacks to more than its size")
                yield piece
        if inflater and (not inflater.eof or inflater.unused_data):
            raise WheelRefused(f"{entry.name!r} is damaged")
        if (size, crc) != (entry.size, entry.crc):
            raise WheelRefused(f"{entry.name!r} has another size or checksum")

    def _listed(self, limits: ArchiveLimits) -> list[ArchiveEntry]:
        """Return the entries of files; raises WheelRefused if the archive could be read otherwise."""
        start, length, count = self._end()
        if count > limits.files:
            raise WheelRefused(f"has {count} entries, at most {limits.files}")
        found, end = [], 0
        for offset, entry in sorted(self._directory(start, length, count)):
            if offset != end:
                raise WheelRefused(f"{entry.name!r} does not begin where the entry before it ends")
            entry, end = self._placed(offset, entry)
            found.append(entry)
        if end != start:
            raise WheelRefused("has bytes that belong to no entry")
        check_names([entry.name for entry in found])
        size = sum(each.size for each in found)
        if size > limits.unpacked:
            raise WheelRefused(f"unpacks to {size} bytes, at most {limits.unpacked}")
        return [entry for entry in found if not entry.name.endswith("/")]

    def _end(self) -> tuple[int, int, int]:
        size = self._file.seek(0, os.SEEK_END)
        if size < END_BYTES:
            raise WheelRefused("is not a zip archive")
        end = self._at(size - END_BYTES, END_BYTES)
        if not end.startswith(END) or end[-2:] != b"\0\0":  # a comment could hold another end
            raise WheelRefused("does not end as a zip archive without a comment does")
        disk, first, here, count, length, start = struct.unpack("<4xHHHHII2x", end)
        if disk or first or here != count:
            raise WheelRefused("is a part of an archive")
        after = size - END_BYTES
        if ALL_16 in (count,) or ALL_32 in (length, start):
            after, count, length, start = self._end_64(after)
        if start + length != after:
            raise WheelRefused("has bytes around its directory")
        return start, length, count

    def _end_64(self, after: int) -> tuple[int, int, int, int]:
        """Return where the zip64 record begins, and from it the number of entries, the length of the
        directory and its beginning."""
        locator = self._at(after - LOCATOR64_BYTES, LOCATOR64_BYTES)
        begins = after - LOCATOR64_BYTES - END64_BYTES
        if locator != LOCATOR64 + struct.pack("<IQI", 0, begins, 1):
            raise WheelRefused("has no valid zip64 record")
        record = self._at(begins, END64_BYTES)
        if record[:12] != END64 + struct.pack("<Q", END64_BYTES - 12):
            raise WheelRefused("has no valid zip64 record")
        disk, first, here, count, length, start = struct.unpack("<16xIIQQQQ", record)
        if disk or first or here != count:
            raise WheelRefused("is a part of an archive")
        return begins, count, length, start

    def _directory(self, start: int, length: int, count: int) -> Iterator[tuple[int, ArchiveEntry]]:
        end = start + length
        for _ in range(count):
            head = self._at(start, ENTRY_BYTES)
            if not head.startswith(ENTRY):
                raise WheelRefused("has a directory that is cut off")
            (by, flags, method, crc, packed, size, named, more, comment, disk, mode, offset) = (
                struct.unpack("<4xxB2xHH4xIIIHHHH2xII", head)
            )
            rest = self._at(start + ENTRY_BYTES, named + more + comment)
            name = _name(rest[:named], flags)
            if comment or disk:
                raise WheelRefused(f"{name!r} has a comment or lies elsewhere")
            _check_kind(name, by, mode >> 16, flags, method)
            wide = [each == ALL_32 for each in (size, packed, offset)]
            wider = _zip64(rest[named:], wide, name)
            size, packed, offset = (
                next(wider) if is_wide else each
                for is_wide, each in zip(wide, (size, packed, offset), strict=True)
            )
            yield offset, ArchiveEntry(name, method, crc, packed, size, flags)
            start += ENTRY_BYTES + len(rest)
        if start != end:
            raise WheelRefused("has a directory with bytes that belong to no entry")

    def _placed(self, offset: int, entry: ArchiveEntry) -> tuple[ArchiveEntry, int]:
        """Return `entry` with the place of its bytes, and where the next begins.

        Raises WheelRefused if its own header tells something else than the directory.
        """
        head = self._at(offset, HEADER_BYTES)
        if not head.startswith(HEADER):
            raise WheelRefused(f"{entry.name!r} has no header")
        flags, method, crc, packed, size, named, more = struct.unpack("<6xHH4xIIIHH", head)
        rest = self._at(offset + HEADER_BYTES, named + more)
        told = crc, packed, size
        meant = entry.crc, entry.packed, entry.size
        if ALL_32 in (packed, size):
            wide = [size == ALL_32, packed == ALL_32]
            wider = _zip64(rest[named:], wide, entry.name)
            size, packed = (
                next(wider) if is_wide else each
                for is_wide, each in zip(wide, (size, packed), strict=True)
            )
            told = crc, packed, size
        late = flags & HAS_DESCRIPTOR
        if (
            (flags, method) != (entry.data, entry.method)
            or _name(rest[:named], flags) != entry.name
            or not (told == meant or (late and told == (0, 0, 0)))
        ):
            raise WheelRefused(f"{entry.name!r} is described in two ways")
        data = offset + HEADER_BYTES + len(rest)
        end = data + entry.packed
        return entry._replace(data=data), end + (self._descriptor(end, entry) if late else 0)

    def _descriptor(self, offset: int, entry: ArchiveEntry) -> int:
        """Return the length of the descriptor after an entry's bytes, in one of its four forms."""
        found = self._file_at(offset, 24)
        for form in ("<III", "<IQQ"):
            plain = (
                struct.pack(form, entry.crc, entry.packed, entry.size)
                if (form == "<IQQ" or max(entry.packed, entry.size) <= ALL_32)
                else b""
            )
            for descriptor in (DESCRIPTOR + plain, plain):
                if plain and found.startswith(descriptor):
                    after = found[len(descriptor) : len(descriptor) + 4]
                    if after in (HEADER, ENTRY) or len(after) < 4:
                        return len(descriptor)
        raise WheelRefused(f"{entry.name!r} is described in two ways")

    def _at(self, offset: int, length: int) -> bytes:
        found = self._file_at(offset, length)
        if len(found) != length:
            raise WheelRefused("is cut off")
        return found

    def _file_at(self, offset: int, length: int) -> bytes:
        if offset < 0:
            raise WheelRefused("is cut off")
        self._file.seek(offset)
        return self._file.read(length)


def _inflated(inflater: Any, packed: bytes, entry: ArchiveEntry) -> Iterator[bytes]:
    """Yield what `packed` inflates to, in pieces, however much it is."""
    while packed and not inflater.eof:
        try:
            piece = inflater.decompress(packed, PIECE)
        except zlib.error:
            raise WheelRefused(f"{entry.name!r} is damaged") from None
        yield piece
        packed = inflater.unconsumed_tail
    if packed:
        raise WheelRefused(f"{entry.name!r} has bytes after its end")


def _name(data: bytes, flags: int) -> str:
    try:
        return data.decode("utf-8" if flags & IS_UTF8 else "ascii")
    except UnicodeDecodeError:
        raise WheelRefused(f"{data!r} is no text") from None


def _zip64(extra: bytes, wide: list[bool], name: str) -> Iterator[int]:
    """Return the numbers of the zip64 field (APPNOTE.TXT 4.5.3), of which there must be just as many as
    were left for it."""
    found = []
    while extra:
        if len(extra) < 4 or len(extra) < 4 + struct.unpack("<2xH", extra[:4])[0]:
            raise WheelRefused(f"{name!r} has a field that is cut off")
        tag, length = struct.unpack("<HH", extra[:4])
        if tag == 1:
            found.append(extra[4 : 4 + length])
        elif tag == 0x7075:  # 4.6.9, another name for the same file
            raise WheelRefused(f"{name!r} has two names")
        extra = extra[4 + length :]
    if len(found) > 1 or (found and len(found[0]) != 8 * sum(wide)) or (any(wide) and not found):
        raise WheelRefused(f"{name!r} has no valid zip64 field")
    return iter(struct.unpack(f"<{sum(wide)}Q", found[0]) if found else ())


def _check_kind(name: str, by: int, mode: int, flags: int, method: int) -> None:
    if flags & ~(HAS_DESCRIPTOR | IS_UTF8 | COMPRESSION_LEVEL):
        raise WheelRefused(f"{name!r} is encrypted or patched")
    if method not in (STORED, DEFLATED):
        raise WheelRefused(f"{name!r} is compressed by method {method}; wheels use 0 and 8")
    kind = mode & 0o170000  # inode(7)
    if by == UNIX and kind and kind != (0o040000 if name.endswith("/") else 0o100000):
        raise WheelRefused(f"{name!r} is a link or a special file")


def check_names(names: list[str]) -> None:
    """Raise WheelRefused unless every name is a plain path, and no two are one file anywhere."""
    seen: dict[str, str] = {}
    for name in names:
        path = name.removesuffix("/")
        parts = path.split("/")
        if len(name.encode()) > MOST_NAME_BYTES or len(parts) > MOST_LEVELS:
            raise WheelRefused(f"{name[:80]!r}... is too long a name")
        if {"", ".", ".."} & set(parts) or "\\" in path or DRIVE.match(path):
            raise WheelRefused(f"{name!r} is not a plain path below the package's directory")
        if any(unicodedata.category(each) in ("Cc", "Cf", "Cs") for each in path):
            raise WheelRefused(f"{name!r} has invisible characters")
        same = seen.setdefault(_folded(path), name)
        if same is not name:
            raise WheelRefused(f"{same!r} and {name!r} are the same name")
    files = {_folded(name) for name in names if not name.endswith("/")}
    for name in names:
        parts = _folded(name.removesuffix("/")).split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise WheelRefused(f"{name!r} lies in a file")


def _folded(path: str) -> str:
    """Return one form for all names that some file system takes for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())

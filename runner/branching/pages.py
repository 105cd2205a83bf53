"""The pages of a process's memory in which a target differs from the source: found, and copied.

A page of a private mapping is a file's, or shared with the launcher that both were forked from, or
the process's own (proc_pid_pagemap(5)).  Files need no copy.  A page that is one process's own is
copied; one that both share with the launcher may differ where the launcher wrote it in between, so it
is compared: by its place in memory where root has opened the page maps, else by its content.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from ..kernel.tracing import MOST_PLACES, Places, TransferRoom
from .layout import Mapping, NotCopyable
from .traced import Traced

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
CHUNK_BYTES = 1 << 20  # that are copied at once
COMPARED_BYTES = 1 << 16  # that are compared at once: both sides fit into a processor's cache
_MOST_ENTRIES = 1 << 16  # of a page map that are read at once
ENTRY_BYTES = 8
SHARED, OWN = 1, 2
# That are compared.  A page that was only read costs a process nothing: all such are one page of zeros.
MOST_COMPARED = 2 << 30
Content = bytes | memoryview


def _kind(flags: int) -> int:
    """Return what a page is by the highest byte of its entry: 63 present, 62 swapped, 61 of a file or
    shared, 56 mapped once."""
    present, swapped, of_file, once = (flags >> bit & 1 for bit in (7, 6, 5, 0))
    if swapped or (present and once and not of_file):
        return OWN
    return SHARED if present and not of_file else 0


KINDS = bytes(map(_kind, range(256)))
RUNS = re.compile(b"[\x02\x03]+|\x01+")
_OF_SOURCE = 4  # beside OWN: it is the source's own
_SOURCE_KINDS = KINDS.replace(bytes((OWN,)), bytes((OWN | _OF_SOURCE,)))
_DIFFERING = re.compile(b"[\x04-\x07]+|[\x02\x03]+|\x01+")
_IS_ZERO, _IS_NOT = (bytes((n == 0) == wanted for n in range(256)) for wanted in (True, False))
_FRAME = range(6)  # the bytes of an entry that say where the page is; only root sees them


class Transfers:
    """Pages that are copied from a source to targets, many at once."""

    def __init__(self, source: Traced, targets: Sequence[Traced]) -> None:
        self._source = source
        self._targets = targets
        self._room = _room()
        self._places: list[tuple[int, int]] = []
        self._size = 0

    def copy(self, address: int, size: int) -> None:
        """Copy pages that the source shares with no other process."""
        while size:
            part = min(size, CHUNK_BYTES - self._size)
            self._places.append((address, part))
            self._size += part
            if self._size == CHUNK_BYTES or len(self._places) == MOST_PLACES:
                self.flush()
            address, size = address + part, size - part

    def flush(self) -> None:
        """Copy what has not been copied yet; raises as Traced.write, and NotCopyable."""
        with _refusing():
            self._source.read_places(self._places, self._room)
        for target in self._targets:
            target.write_places(self._places, self._room)
        self._places, self._size = [], 0


@cache
def _room() -> TransferRoom:
    return TransferRoom(CHUNK_BYTES)


def copy_pages(
    source: Traced, targets: list[Traced], mappings: list[Mapping], maps: tuple[int, ...]
) -> None:
    """Make the memory of each target equal to that of `source`, whose layout they have already.

    `maps`: the page maps of all, if root has opened them; else they are opened here.  Raises
    NotCopyable if a page cannot be read, and OSError if a target has no room for it.
    """
    maps = maps or tuple(each.open("pagemap") for each in (source, *targets))
    transfers, left = Transfers(source, targets), MOST_COMPARED
    for address, size, kind in _differing(maps, mappings):
        if kind & _OF_SOURCE:
            transfers.copy(address, size)
            continue
        left -= 0 if kind & OWN else size
        if left < 0:
            raise NotCopyable(f"it has read more than {MOST_COMPARED >> 30} GiB it never wrote")
        for start in range(address, address + size, CHUNK_BYTES):
            data = read(source, start, min(CHUNK_BYTES, address + size - start))
            for target in targets:
                if kind & OWN:
                    target.write(start, data)
                else:
                    write_differences(target, start, data)
    transfers.flush()


def read(source: Traced, start: int, size: int) -> bytes:
    """Return memory of the source; raises NotCopyable."""
    with _refusing():
        return source.read(start, size)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # such as of a guard page: madvise(2)
        raise NotCopyable(f"some of its memory cannot be read: {error.strerror}") from None


def _differing(maps: tuple[int, ...], mappings: list[Mapping]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of pages as address, size, and what they are: SHARED, or some process's OWN."""
    for start, count in stretches(mappings):
        entries = [entries_of(each, start, count) for each in maps]
        flags = [each[ENTRY_BYTES - 1 :: ENTRY_BYTES] for each in entries]
        kinds = _number(flags[0].translate(_SOURCE_KINDS))
        for each in flags[1:]:
            kinds |= _number(each.translate(KINDS))
        kinds &= _number(b"\xfe" * count) | _elsewhere(entries)
        for run in _DIFFERING.finditer(kinds.to_bytes(count, "little")):
            yield start + run.start() * PAGE_BYTES, len(run[0]) * PAGE_BYTES, run[0][0]


def entries_of(page_map: int, start: int, count: int) -> bytes:
    """Return entries of a page map; raises ProcessLookupError if the process was killed: a page map
    ends where its memory does."""
    size = count * ENTRY_BYTES
    entries = os.pread(page_map, size, start // PAGE_BYTES * ENTRY_BYTES)
    if len(entries) != size:
        raise ProcessLookupError(errno.ESRCH, "the process ended")
    return entries


def _elsewhere(entries: list[bytes]) -> int:
    """Return a byte for each page that is 1 unless the page is known to be at one place in all maps."""
    first, differ = _number(entries[0]), 0
    for each in entries[1:]:
        differ |= first ^ _number(each)
    unequal = differ.to_bytes(len(entries[0]), "little")
    is_unknown = _any(entries[0], _FRAME).translate(_IS_ZERO)
    return _number(_any(unequal, range(ENTRY_BYTES)).translate(_IS_NOT)) | _number(is_unknown)


def _any(entries: bytes, of: range) -> bytes:
    """Return the bytes `of` each entry, combined by or."""
    found = 0
    for n in of:
        found |= _number(entries[n::ENTRY_BYTES])
    return found.to_bytes(len(entries) // ENTRY_BYTES, "little")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def stretches(mappings: Iterable[Mapping]) -> Iterator[tuple[int, int]]:
    """Yield addresses and numbers of pages that are read at once: neighbours together."""
    start = end = 0
    for each in mappings:
        if each.is_fixed or each.rights[3] != "p":
            continue
        if each.start != end:
            yield from _cut(start, end)
            start = each.start
        end = each.end
    yield from _cut(start, end)


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, _MOST_ENTRIES * PAGE_BYTES):
        yield at, min(_MOST_ENTRIES, (end - at) // PAGE_BYTES)


def write_pages(target: Traced, places: Places, content: Sequence[memoryview]) -> None:
    """Write pages to places, many at once; raises as Traced.write."""
    for at in range(0, len(places), MOST_PLACES):
        target.write_content(places[at : at + MOST_PLACES], content[at : at + MOST_PLACES])


def write_differences(target: Traced, start: int, content: Content) -> None:
    """Write the pages of `content` that a target does not have already."""
    for first, end in differences(target, start, content):
        target.write(start + first, content[first:end])


def differences(process: Traced, start: int, content: Content) -> Iterator[tuple[int, int]]:
    """Yield the pages in which memory differs from `content`, from one offset to another."""
    size = len(content)
    for at in range(0, size, COMPARED_BYTES):
        expected = content if size <= COMPARED_BYTES else content[at : at + COMPARED_BYTES]
        had = process.read_into(start + at, bytearray(len(expected)))
        if not is_equal(had, expected):
            yield from ((at + first, at + end) for first, end in unequal(had, expected))


def is_equal(had: bytearray, expected: object) -> bool:
    """Compare by memcmp(3), as a bytearray is with any memory; Python compares views item by item."""
    return had == expected


def unequal(had: bytearray, expected: Content) -> Iterator[tuple[int, int]]:
    """Yield from and to which offsets pages differ, those beside each other together."""
    begin = -1
    for offset in range(0, len(had), PAGE_BYTES):
        if is_equal(had[offset : offset + PAGE_BYTES], expected[offset : offset + PAGE_BYTES]):
            if begin >= 0:
                yield begin, offset
            begin = -1
        elif begin < 0:
            begin = offset
    if begin >= 0:
        yield begin, len(had)

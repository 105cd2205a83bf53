"""The pages of a process's memory in which a target differs from the source: found, and copied.

A page of a private mapping is a file's, or shared with the launcher that both were forked from, or
the process's own (proc_pid_pagemap(5)).  Files need no copy.  A page that is one process's own is
copied; one that both share with the launcher may differ where the launcher wrote it in between, so it
is compared: by its place in memory where root has opened the page maps, else by its content.
"""

import os
import re
from collections.abc import Iterable, Iterator

from .layout import Mapping, NotCopyable
from .traced import Traced

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
CHUNK_BYTES = 1 << 20  # that are read at once
_MOST_ENTRIES = 1 << 16  # of a page map that are read at once
ENTRY_BYTES = 8
SHARED, OWN = 1, 2
# That are compared.  A page that was only read costs a process nothing: all such are one page of zeros.
MOST_COMPARED = 2 << 30


def _kind(flags: int) -> int:
    """Return what a page is by the highest byte of its entry: 63 present, 62 swapped, 61 of a file or
    shared, 56 mapped once."""
    present, swapped, of_file, once = (flags >> bit & 1 for bit in (7, 6, 5, 0))
    if swapped or (present and once and not of_file):
        return OWN
    return SHARED if present and not of_file else 0


KINDS = bytes(map(_kind, range(256)))
RUNS = re.compile(b"[\x02\x03]+|\x01+")


def copy_pages(
    source: Traced, targets: list[Traced], mappings: list[Mapping], maps: tuple[int, ...]
) -> None:
    """Make the memory of each target equal to that of `source`, whose layout they have already.

    `maps`: the page maps of all, if root has opened them; else they are opened here.  Raises
    NotCopyable if a page cannot be read, and OSError if a target has no room for it.
    """
    maps = maps or tuple(each.open("pagemap") for each in (source, *targets))
    left = MOST_COMPARED
    for first, length, is_own in _differing(maps, mappings):
        left -= 0 if is_own else length
        if left < 0:
            raise NotCopyable(f"it has read more than {MOST_COMPARED >> 30} GiB it never wrote")
        for start in range(first, first + length, CHUNK_BYTES):
            data = read(source, start, min(CHUNK_BYTES, first + length - start))
            for target in targets:
                if is_own:
                    target.write(start, data)
                else:
                    write_differences(target, start, data)


def read(source: Traced, start: int, size: int) -> bytes:
    """Return memory of the source; raises NotCopyable."""
    try:
        return source.read(start, size)
    except OSError as error:  # such as of a guard page: madvise(2)
        raise NotCopyable(f"some of its memory cannot be read: {error.strerror}") from None


def _differing(maps: tuple[int, ...], mappings: list[Mapping]) -> Iterator[tuple[int, int, bool]]:
    """Yield runs of pages as address, length, and whether some process has its own."""
    for start, count in stretches(mappings):
        size, offset = count * ENTRY_BYTES, start // PAGE_BYTES * ENTRY_BYTES
        read = [os.pread(each, size, offset) for each in maps]
        kinds = 0
        for entries in read:
            kinds |= int.from_bytes(entries[7::8].translate(KINDS), "little")
        for run in RUNS.finditer(kinds.to_bytes(count, "little")):
            is_own = run[0][0] != SHARED
            if is_own or not _are_same(read, *run.span()):
                address = start + run.start() * PAGE_BYTES
                yield address, len(run[0]) * PAGE_BYTES, is_own


def _are_same(read: list[bytes], first: int, end: int) -> bool:
    """Tell whether pages are the same in all page maps; only root sees where pages are."""
    here = slice(first * ENTRY_BYTES, end * ENTRY_BYTES)
    frames = read[0][here]
    return any(frames[: ENTRY_BYTES - 2]) and all(other[here] == frames for other in read[1:])


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


def write_differences(target: Traced, start: int, data: bytes) -> None:
    """Write the pages that a target does not have already."""
    had = target.read(start, len(data))
    if data == had:
        return
    for offset in range(0, len(data), PAGE_BYTES):
        page = data[offset : offset + PAGE_BYTES]
        if page != had[offset : offset + PAGE_BYTES]:
            target.write(start + offset, page)

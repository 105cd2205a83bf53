"""Memory that a fork copies: where a child can write, and the page tables that it is given.

See proc_pid_maps(5), proc_pid_pagemap(5) and proc_pid_mem(5).  A process that is not dumpable has to be
made so before it reads these of itself.
"""

import contextlib
import os
import struct

from . import libc

_MADV_POPULATE_READ = 22
_RANGE = struct.Struct("=2Q")

Range = tuple[int, int]  # start and end


def writable() -> bytes:
    """Return what memory of this process can be written, as pairs of start and end."""
    return _packed(_mappings("rw-p"))


def of_files() -> bytes:
    """Return where files are mapped to be read or executed, as pairs of start and end."""
    return _packed([*_mappings("r-xp"), *_mappings("r--p")])


def share_page_tables(used: bytes) -> None:
    """Have every fork copy the page tables of what is `used` of files: no child faults it in again.

    `used` are pairs of address and length.

    The kernel copies those of a mapping that has a page of its own (vma_needs_copy, mm/memory.c).  So
    each gets one: its first byte is written back as it is.  Of what is not used it has none to copy.
    """
    ranges = [*_RANGE.iter_unpack(used)]
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        for start, end in (*_mappings("r-xp"), *_mappings("r--p")):
            within = [each for each in ranges if start <= each[0] < end]
            if within:
                os.pwrite(memory, os.pread(memory, 1, start), start)
            for place, length in within:
                _advise(place, min(length, end - place), _MADV_POPULATE_READ)
    finally:
        os.close(memory)


def _advise(start: int, length: int, advice: int) -> None:
    """Give advice that the kernel need not take (madvise(2))."""
    with contextlib.suppress(OSError):
        libc.syscall("madvise", start, length, advice)


def _packed(mappings: list[Range]) -> bytes:
    return b"".join(_RANGE.pack(*each) for each in mappings)


def _mappings(rights: str) -> list[Range]:
    found: list[Range] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, _, _, inode, *name = line.split()
            is_file = inode != "0"
            if mode == rights and (is_file or rights == "rw-p") and name[:1] != ["[vvar]"]:
                start, end = (int(each, 16) for each in span.split("-"))
                found.append((start, end))
    return found

"""Memory that a fork copies: the pages that a child writes, and the page tables that it is given.

See proc_pid_maps(5), proc_pid_pagemap(5) and proc_pid_mem(5).  A process that is not dumpable has to be
made so before it reads these of itself.
"""

import os
import struct
from collections.abc import Callable

from . import _steps, libc

_MADV_POPULATE_READ = 22
_RANGE = struct.Struct("=2Q")
_SMALLEST = 64 * 1024  # of a mapping whose page table is worth copying

Range = tuple[int, int]  # address and length


def pages_written_by(work: Callable[[], object]) -> bytes:
    """Return which writable memory of this process a child writes that does `work`, as pairs of address
    and length."""
    regions = b"".join(_RANGE.pack(start, end) for start, end in _mappings("rw-p"))
    with open(os.memfd_create("written", os.MFD_CLOEXEC), "rb") as found:
        # A page that either of the two writes is from then on each one's own: so the parent waits.
        if _steps.fork(0, -1, True) == 0:
            try:
                work()
                _steps.written(regions, found.fileno())
            finally:
                os._exit(0)
        found.seek(0)
        return found.read()


def share_page_tables() -> None:
    """Have every fork copy the page tables of libraries, so that no child faults them in again.

    The kernel copies those of a mapping that has a page of its own (vma_needs_copy, mm/memory.c).  So
    each gets one: its first byte is written back as it is.
    """
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        for start, end in (*_mappings("r-xp"), *_mappings("r--p")):
            if end - start >= _SMALLEST:
                os.pwrite(memory, os.pread(memory, 1, start), start)
                libc.advise(start, end - start, _MADV_POPULATE_READ)
    finally:
        os.close(memory)


def _mappings(rights: str) -> list[Range]:
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, _, _, inode, *name = line.split()
            is_file = inode != "0"
            if mode == rights and (is_file or rights == "rw-p") and name[:1] != ["[vvar]"]:
                start, end = (int(each, 16) for each in span.split("-"))
                found.append((start, end))
    return found

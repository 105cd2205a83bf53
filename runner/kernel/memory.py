"""Memory that a fork copies: the pages that a child writes, and the page tables that it is given.

See proc_pid_maps(5), proc_pid_pagemap(5) and proc_pid_mem(5).  A process that is not dumpable has to be
made so before it reads these of itself.
"""

import os
import struct
from collections.abc import Callable

from . import _steps, libc

_MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_RANGE = struct.Struct("=2Q")
_SMALLEST = 64 * 1024  # of a mapping whose page table is worth copying

Range = tuple[int, int]  # address and length


def pages_written_by(work: Callable[[], object]) -> tuple[Range, ...]:
    """Return which writable memory of this process a child writes that does `work`."""
    regions = b"".join(_RANGE.pack(start, end) for start, end in _mappings("rw-p"))
    read, write = os.pipe()
    pid = _steps.fork()
    if pid == 0:
        try:
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
            work()
            _steps.written(pagemap, regions, write)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return tuple((address, length) for address, length in _RANGE.iter_unpack(found))


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

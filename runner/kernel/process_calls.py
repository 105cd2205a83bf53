"""Processes, namespaces and memory: clone, setns, unshare, close_range, and what a fork copies."""

import contextlib
import os
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from . import _steps, syscall

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_ADDR_NO_RANDOMIZE = 0x0040000  # personality(2)
_ASK = 0xFFFFFFFF


@contextlib.contextmanager
def without_randomized_addresses() -> Iterator[None]:
    """Start the children of this thread without a random address layout meanwhile."""
    before = syscall("personality", _ASK)
    syscall("personality", before | _ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        syscall("personality", before)


def sleeper(flags: int, proc: int) -> tuple[int, int, int, int, int]:
    """Start a process in the new namespaces of `flags` that sleeps until it is killed; return its
    pidfd and its pid, net, ipc and uts namespaces.

    It is in pause(2) and executes nothing else, so it can share our memory and descriptors, and costs
    next to nothing. We have to ignore SIGCHLD, as it does then. `proc` is /proc of our pid namespace.
    Raises an OSError whose filename names the refused operation.
    """
    return _steps.sleeper(flags, proc)


def copy_descriptor(process: int, descriptor: int) -> int:
    """Return a descriptor of this process for the open file `descriptor` of `process`, a pidfd; it
    is closed on exec (pidfd_getfd(2), Linux 5.6)."""
    return syscall("pidfd_getfd", process, descriptor, 0)


def enter(namespace: int, kind: int = 0) -> None:
    """Move into the namespace that a descriptor stands for, of a `kind` such as CLONE_NEWNET or of any;
    into a pid namespace it is our children that move (setns(2))."""
    syscall("setns", namespace, kind)


def unshare(flags: int) -> None:
    syscall("unshare", flags)


def close_range(first: int, last: int) -> None:
    """Close every descriptor from `first` to `last`, by number: a sweep through /proc/self/fd can
    be denied and then closes nothing."""
    if first <= last:
        syscall("close_range", first, last, 0)


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    first = 0
    for descriptor in sorted(keep):
        close_range(first, descriptor - 1)
        first = descriptor + 1
    close_range(first, 0xFFFFFFFF)


def company_of(pid: int, init: int) -> str:
    """Describe the processes and threads of a cell other than the thread `pid`; orphans are children of
    `init`.

    Raises FileNotFoundError if one has ended, or the kernel lists no children (CONFIG_PROC_CHILDREN).
    """
    if len(os.listdir(f"/proc/{pid}/task")) != 1:
        return "runs threads"
    for each in (pid, init):
        with open(f"/proc/{each}/task/{each}/children", "rb") as file:
            if file.read(64).strip():
                return "has child processes"
    return ""


def open_device(process: int | str, names: Collection[str]) -> str:
    """Return the path of the first device of `names` below /dev that a process has open or mapped;
    empty if it has none."""
    paths = [f"/dev/{name}" for name in names]
    for number in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            if (link := os.readlink(f"/proc/{process}/fd/{number}")) in paths:
                return link
    with open(f"/proc/{process}/maps", "rb") as file:
        mapped = {line.split(b" ", 5)[-1].strip() for line in file}
    return next((path for path in paths if os.fsencode(path) in mapped), "")


# Memory that a fork copies: where a child can write, and the page tables that it is given. See
# proc_pid_maps(5), proc_pid_pagemap(5) and proc_pid_mem(5). A process that is not dumpable has to
# be made so before it reads these of itself.
_MADV_POPULATE_READ = 22
_PROT_READ, _PROT_EXEC = 1, 4
_PAGE = os.sysconf("SC_PAGESIZE")
_LEAST_GATHERED, _MOST_GATHERED = 256 * 1024, 64 * 1024 * 1024  # bytes
# VmFlags of memory without advice: rights, and whether huge pages are welcome (proc_pid_smaps(5)).
_PLAIN = frozenset(("rd", "wr", "mr", "mw", "me", "ac", "sd", "hg", "nh"))
_RANGE = struct.Struct("=2Q")

_Span = tuple[int, int]  # start and end


class _Mapping(NamedTuple):
    """One line of proc_pid_maps(5)."""

    start: int
    end: int
    rights: str
    offset: int
    file: str  # its device and inode; empty for memory
    name: str


def writable_memory() -> bytes:
    """Return what memory of this process can be written, as pairs of start and end."""
    return _packed(_mappings("rw-p"))


def join_mappings() -> None:
    """Make the constants of each library executable as its code is, so that the kernel has one mapping
    of both in the place of three: a fork copies each mapping, and an end removes each.

    A process may do this with every file that it may execute (mprotect(2)). Nothing becomes writable.
    """
    mappings = [*_all_mappings()]
    for code in mappings:
        if code.rights == "r-xp" and code.file:
            for each in mappings:
                is_beside = code.start in (each.end, each.start - (code.end - code.start))
                if is_beside and each.rights == "r--p" and _is_same_piece(code, each):
                    with contextlib.suppress(OSError):
                        size = each.end - each.start
                        syscall("mprotect", each.start, size, _PROT_READ | _PROT_EXEC)


def _is_same_piece(one: _Mapping, other: _Mapping) -> bool:
    return one.file == other.file and one.offset - other.offset == one.start - other.start


def gather_memory() -> None:
    """Move the memory of this process, which it must have alone, into huge pages (_steps.gather)."""
    found: list[_Span] = []
    room, plain = _MOST_GATHERED, _without_advice()
    for each in _all_mappings():
        size = each.end - each.start
        is_memory = each.rights == "rw-p" and each.start in plain
        if is_memory and _LEAST_GATHERED <= size <= room and _is_full(each):
            found.append((each.start, each.end))
            room -= size
    _steps.gather(_packed(found))


def _without_advice() -> set[int]:
    """Return where memory begins that would lose no advice by a move: a fork must wipe the state of a
    random generator (MADV_WIPEONFORK), and some keys must stay in one process (MADV_DONTFORK)."""
    start, found = 0, set()
    with contextlib.suppress(FileNotFoundError), open("/proc/self/smaps") as smaps:
        for line in smaps:
            first, *words = line.split()
            if not first.endswith(":"):
                start = int(first.partition("-")[0], 16)
            elif first == "VmFlags:" and _PLAIN.issuperset(words):
                found.add(start)
    return found


def _is_full(mapping: _Mapping) -> bool:
    """Tell whether three of four pages are present: gathering would make all of them."""
    pages = (mapping.end - mapping.start) // _PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(mapping.start // _PAGE * 8)
        words = memoryview(pagemap.read(pages * 8)).cast("Q")
    return sum(word >> 63 for word in words) * 4 >= pages * 3


def mapped_files() -> bytes:
    """Return where files are mapped to be read or executed, as pairs of start and end."""
    return _packed([*_mappings("r-xp"), *_mappings("r--p")])


def share_page_tables(used: bytes) -> None:
    """Have every fork copy the page tables of the `used` parts of mapped files, so that no child faults
    them in again.

    `used` are pairs of address and length.

    The kernel copies those of a mapping that has a page of its own (vma_needs_copy, mm/memory.c). So
    each gets one: its first byte is written back as it is. The other parts have no page table entries
    to copy.
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
        syscall("madvise", start, length, advice)


def _packed(mappings: list[_Span]) -> bytes:
    return b"".join(_RANGE.pack(*each) for each in mappings)


def _mappings(rights: str) -> list[_Span]:
    return [
        (each.start, each.end)
        for each in _all_mappings()
        if each.rights == rights and (each.file or rights == "rw-p") and each.name != "[vvar]"
    ]


def _all_mappings() -> Iterator[_Mapping]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, offset, device, inode, *name = line.split(maxsplit=5)
            start, end = (int(each, 16) for each in span.split("-"))
            file = f"{device} {inode}" if inode != "0" else ""
            yield _Mapping(start, end, rights, int(offset, 16), file, "".join(name).strip())

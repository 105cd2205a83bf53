"""`branch`: make fresh cells equal to the cell of a session, in order.

Every step before the pages reads the source and has the targets, which no guest has used yet, make
calls of their own: so each call passes the filter, the mounts and the caps of the target's cell.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ..kernel.tracing import MOST_PLACES, Places, TransferRoom
from . import layout
from .kernel_state import (
    State,
    copy_limits,
    copy_state,
    require_alone,
    require_copyable,
    require_equal,
    state_of,
)
from .layout import Change, Mapping, NotCopyable
from .traced import Machine, Traced, machine, number_of

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
CHUNK_BYTES = 1 << 20  # bytes copied at once
COMPARED_BYTES = 1 << 16  # bytes compared at once, so that both sides fit into a processor's cache
_MOST_ENTRIES = 1 << 16  # entries of a page map read at once
ENTRY_BYTES = 8
SHARED, OWN = 1, 2
# Kinds that are compared. A page that was only read costs nothing, because all such pages are one page
# of zeros.
MOST_COMPARED = 2 << 30
Content = bytes | memoryview


def _kind(flags: int) -> int:
    """Return the kind of a page by the highest byte of its entry: bit 63 present, 62 swapped, 61 of
    a file or shared, 56 mapped once."""
    present, swapped, of_file, once = (flags >> bit & 1 for bit in (7, 6, 5, 0))
    if swapped or (present and once and not of_file):
        return OWN
    return SHARED if present and not of_file else 0


KINDS = bytes(map(_kind, range(256)))
RUNS = re.compile(b"[\x02\x03]+|\x01+")
_OF_SOURCE = 4  # in addition to OWN: the source has the page itself
_SOURCE_KINDS = KINDS.replace(bytes((OWN,)), bytes((OWN | _OF_SOURCE,)))
_DIFFERING = re.compile(b"[\x04-\x07]+|[\x02\x03]+|\x01+")
_IS_ZERO, _IS_NOT = (bytes((n == 0) == wanted for n in range(256)) for wanted in (True, False))
_FRAME = range(6)  # the bytes of an entry with the page frame number, which only root sees


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
        """Copy the rest; raises as Traced.write, and NotCopyable."""
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
    """Copy the memory of `source` to each target; the layouts are equal already.

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
    except OSError as error:  # a guard page, for example (madvise(2))
        raise NotCopyable(f"some of its memory cannot be read: {error.strerror}") from None


def _differing(maps: tuple[int, ...], mappings: list[Mapping]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of pages as address, size and kind: SHARED, or OWN of a process."""
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
    """Yield the ranges of offsets in which pages differ; adjacent pages are one range."""
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


_FIXED, _PRIVATE, _ANONYMOUS, _NORESERVE = 0x10, 0x2, 0x20, 0x4000  # mmap(2)
_WIPEONFORK = 18  # madvise(2)
_AT_FDCWD = -100
_CLOCK_REALTIME = 0


class BranchedProcesses(NamedTuple):
    """Pidfds: of the session's process, of the init of its cell, and of fresh cells' processes.

    `maps` are the page maps of the source and of each target, if root has opened them.
    """

    source: int
    init: int
    targets: tuple[int, ...]
    maps: tuple[int, ...] = ()


def branch(given: BranchedProcesses) -> None:
    """Make every target equal to the source.

    If anything fails every target is killed, and the source goes on in any case.  Raises NotCopyable
    with the reason why this session cannot be copied, and OSError if a target failed.
    """
    known = machine()
    if known is None:
        raise NotCopyable(f"branching by memory is not available on {os.uname().machine}")
    with contextlib.ExitStack() as opened:
        source = Traced(given.source, known, is_source=True)
        opened.callback(source.close, dies=False)
        targets = _stopped(given.targets, known, opened)
        mappings, wanted = checked(source, number_of(given.init))
        wiped = wiped_of(source, mappings)
        fresh = [state_of(each) for each in targets]
        for had in fresh:
            require_copyable(wanted, had)
        for target, had in zip(targets, fresh, strict=True):
            lay_out(target, mappings)
            for each in wiped:
                target.call("madvise", each.start, each.end - each.start, _WIPEONFORK)
            copy_state(wanted, had, target)
        copy_pages(source, targets, [each for each in mappings if each not in wiped], given.maps)
        for target, had in zip(targets, fresh, strict=True):
            copy_limits(wanted, had, target)
            require_equal(wanted, state_of(target))
            target.become(source.registers, source.extended)
        for target in targets:
            target.close(dies=False)


def _stopped(pidfds: tuple[int, ...], known: Machine, opened: contextlib.ExitStack) -> list[Traced]:
    targets = []
    for pidfd in pidfds:
        targets.append(Traced(pidfd, known, is_source=False))
        opened.callback(targets[-1].close, dies=True)
    return targets


def checked(source: Traced, init: int) -> tuple[list[Mapping], State]:
    """Return the layout and the state of a session whose process is alone; raises NotCopyable."""
    require_alone(source, init)
    return source.mappings(), state_of(source)


def wiped_of(source: Traced, mappings: list[Mapping]) -> list[Mapping]:
    """Return the mappings whose content no other process may have."""
    return layout.wiped(source.text("smaps", layout.SMAPS_BYTES), mappings)


def lay_out(target: Traced, wanted: list[Mapping]) -> None:
    """Give `target` the layout `wanted`."""
    had = target.mappings()
    _require_code(target, wanted, had)
    if _grow(target, wanted, had):
        had = target.mappings()
    steps = layout.changes(wanted, had)
    files: dict[bytes, list[Change]] = {}
    for step in steps:
        if step.kind == "file":
            files.setdefault(step.mapping.name, []).append(step)
        else:
            _change(target, step)
    for path, pieces in files.items():
        _map_file(target, path, pieces)
    if steps and layout.changes(wanted, target.mappings()):
        raise NotCopyable("its memory is laid out in a way that a copy cannot have")


def _require_code(target: Traced, wanted: list[Mapping], had: list[Mapping]) -> None:
    """Raise NotCopyable if the source has other memory where the target makes its calls."""
    at = target.parked.instruction
    ours, theirs = (
        [each for each in some if each.start <= at < each.end] for some in (wanted, had)
    )
    if not ours or ours[0].content() != theirs[0].content() or ours[0].rights != theirs[0].rights:
        raise NotCopyable("it has mapped something else in place of the C library")


def _grow(target: Traced, wanted: list[Mapping], had: list[Mapping]) -> bool:
    """Grow the heap and the stack of `target`: the kernel grows a stack that a call writes to.

    Return whether one of them had to grow.
    """
    heap, before = _named(wanted, layout.HEAP), _named(had, layout.HEAP)
    if grows := bool(heap and (not before or heap[-1].end != before[-1].end)):
        target.call("brk", heap[-1].end)
    stack, before = _named(wanted, layout.STACK), _named(had, layout.STACK)
    if stack and before and stack[0].start < before[0].start:
        grows = True
        with contextlib.suppress(
            OSError
        ):  # the comparison then finds that the layouts still differ
            target.call("clock_gettime", _CLOCK_REALTIME, stack[0].start)
    return grows


def _named(mappings: list[Mapping], name: bytes) -> list[Mapping]:
    return [each for each in mappings if each.name == name]


def _change(target: Traced, step: Change) -> None:
    size = step.end - step.start
    if step.kind == "unmap":
        target.call("munmap", step.start, size)
    elif step.kind == "protect":
        target.call("mprotect", step.start, size, step.protection)
    else:
        flags = _FIXED | _PRIVATE | _ANONYMOUS | _NORESERVE
        target.call("mmap", step.start, size, step.protection, flags, -1, 0)


def _map_file(target: Traced, path: bytes, pieces: list[Change]) -> None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        opened = target.call("openat", _AT_FDCWD, path + b"\0", flags)
        for step in pieces:
            size, flags = step.end - step.start, _FIXED | _PRIVATE
            target.call("mmap", step.start, size, step.protection, flags, opened, step.offset)
        target.call("close", opened)
    except OSError as error:
        raise NotCopyable(f"a file that it has mapped cannot be mapped again: {error}") from None

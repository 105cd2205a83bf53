"""`keep` and `restore`: a session's memory is written to a file, and a fresh cell made equal to it."""

import bisect
import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from . import layout
from .copying import checked, lay_out
from .kept import KeptMemory, KeptReader, KeptWriter, PageRun, files_of, without
from .layout import Mapping, NotCopyable
from .machine import Machine, machine
from .pages import (
    CHUNK_BYTES,
    COMPARED_BYTES,
    KINDS,
    MOST_COMPARED,
    OWN,
    PAGE_BYTES,
    RUNS,
    differences,
    entries_of,
    is_equal,
    read,
    stretches,
    unequal,
    write_pages,
)
from .state import IDS, copy_limits, copy_state, require_copyable, require_equal, state_of
from .traced import Traced, number_of

_OF_IMAGE = 4  # beside the kinds of pages.py
_KEPT = bytes(OWN if kind == _OF_IMAGE or kind & OWN else kind & 1 for kind in range(8)) + bytes(
    248
)
_DONTNEED = 4  # madvise(2)
_ZEROS = bytes(PAGE_BYTES)
_PRESENT = re.compile(b"[^\0]+")  # of kinds of pages


def _known_machine() -> Machine:
    known = machine()
    if known is None:
        raise NotCopyable(f"branching by memory is not available on {os.uname().machine}")
    return known


def keep(guest: int, init: int, fresh: KeptReader | None, file: int, most_bytes: int) -> None:
    """Write to `file` what a session's memory has beyond that of a `fresh` cell, or all of it; the
    session goes on.

    `guest`, `init`: pidfds.  Raises NotCopyable with the reason why this session cannot be kept.
    """
    known = _known_machine()
    with contextlib.ExitStack() as opened:
        source = Traced(guest, known, is_source=True)
        opened.callback(source.close, dies=False)
        mappings, state = checked(source, number_of(init))
        if fresh:  # what no fresh cell could be given is refused now: later the session is gone
            require_copyable(state, fresh.kept.state)
            layout.changes(mappings, layout.parse(fresh.kept.maps))
        writer = KeptWriter(file, most_bytes)
        _keep_pages(source, mappings, fresh, writer)
        maps, files = source.text("maps", layout.MAPS_BYTES), files_of(source, mappings)
        source.require_living()  # else not all of this is its own
        runs = tuple(writer.runs)
        writer.finish(KeptMemory(maps, state, source.registers, source.extended, files, runs))


def _keep_pages(
    source: Traced, mappings: list[Mapping], image: KeptReader | None, writer: KeptWriter
) -> None:
    page_map, left = source.open("pagemap"), MOST_COMPARED
    for run, is_own in _kept_runs(page_map, mappings, image):
        left -= 0 if is_own else run.size
        if left < 0:
            raise NotCopyable(f"it has read more than {MOST_COMPARED >> 30} GiB it never wrote")
        at_once = CHUNK_BYTES if is_own else COMPARED_BYTES
        for start in range(run.address, run.end, at_once):
            data = bytearray(read(source, start, min(at_once, run.end - start)))
            if image is None:
                writer.add(start, data)
            elif is_own:
                _keep_own(start, data, image, writer)
            else:
                _keep_differences(start, data, image, mappings, writer)


def _kept_runs(
    page_map: int, mappings: Iterable[Mapping], image: KeptReader | None
) -> Iterator[tuple[PageRun, bool]]:
    """Yield the pages that a process has of its own, or the image where the process has none, and
    those that it shares with its launcher, with whether they are its own."""
    for start, count in stretches(mappings):
        kinds = _kinds(page_map, start, count)
        for run in image.within(start, start + count * PAGE_BYTES) if image else ():
            first, last = (at // PAGE_BYTES for at in (run.address - start, run.end - start))
            for at in range(first, last):
                kinds[at] |= _OF_IMAGE
        for found in RUNS.finditer(kinds.translate(_KEPT)):
            size = len(found[0]) * PAGE_BYTES
            yield PageRun(start + found.start() * PAGE_BYTES, size), found[0][0] == OWN


def _kinds(page_map: int, start: int, count: int) -> bytearray:
    return bytearray(entries_of(page_map, start, count)[7::8].translate(KINDS))


def _keep_own(start: int, data: bytearray, image: KeptReader, writer: KeptWriter) -> None:
    """Keep a process's own pages but those that are as in the image: each cell has copies of its own of
    some pages before a program writes them."""
    for run in without((PageRun(start, len(data)),), _alike(start, data, image)):
        writer.add(run.address, data[run.address - start : run.end - start])


def _alike(start: int, data: bytearray, image: KeptReader) -> Iterator[PageRun]:
    for run in image.within(start, start + len(data)):
        had = data[run.address - start : run.end - start]
        differ = unequal(had, image.all_of(run))
        yield from without((run,), (PageRun(run.address + at, end - at) for at, end in differ))


def _keep_differences(
    start: int, data: bytearray, image: KeptReader, mappings: list[Mapping], writer: KeptWriter
) -> None:
    """Keep the pages that are not those of the image; new memory reads as zeros, which need no page."""
    if is_equal(data, image.content(start, len(data))):
        return
    for offset in range(0, len(data), PAGE_BYTES):
        page, address = data[offset : offset + PAGE_BYTES], start + offset
        expected = image.content(address, PAGE_BYTES)
        if is_equal(page, expected):
            continue
        if expected is not None or page != _ZEROS or _at(mappings, address).is_file:
            writer.add(address, page)


def _at(mappings: list[Mapping], address: int) -> Mapping:
    return mappings[bisect.bisect_right(mappings, address, key=lambda each: each.start) - 1]


def restore(guest: int, fresh: KeptReader, kept: int) -> None:
    """Make a fresh cell, of whose process `guest` is the pidfd, equal to a session that was kept.

    If anything fails the fresh process is killed.  Raises NotCopyable if this cell differs from the one
    in which the session was, OSError if it has no room, and ValueError for a malformed file.
    """
    known = _known_machine()
    with contextlib.ExitStack() as opened:
        reader = KeptReader(kept)
        head = reader.kept
        target = Traced(guest, known, is_source=False)
        opened.callback(target.close, dies=True)
        if len(head.extended) != len(target.extended) or len(head.registers) != len(
            target.registers
        ):
            raise NotCopyable("the processor has other registers")
        mappings, had = layout.parse(head.maps), state_of(target)
        require_copyable(head.state, had, IDS)
        lay_out(target, mappings)
        if files_of(target, mappings) != head.files:
            raise NotCopyable("a file that it has mapped was replaced or changed")
        copy_state(head.state, had, target)
        _restore_pages(target, mappings, fresh, reader)
        copy_limits(head.state, had, target)
        require_equal(head.state, state_of(target), IDS)
        target.become(head.registers, head.extended)
        target.close(dies=False)


def _restore_pages(
    target: Traced, mappings: list[Mapping], image: KeptReader, kept: KeptReader
) -> None:
    page_map, written = target.open("pagemap"), []
    for start, count in stretches(mappings):
        end = start + count * PAGE_BYTES
        of_image, of_kept = image.within(start, end), kept.within(start, end)
        # First, as a call needs its instruction.
        for run in _superfluous(page_map, start, count, (*of_image, *of_kept)):
            target.call("madvise", run.address, run.size, _DONTNEED)
        for run in _of_another(target, image, without(of_image, of_kept)):
            target.write(run.address, image.all_of(run))
        written += of_kept
    write_pages(target, written, [kept.all_of(run) for run in written])


def _of_another(target: Traced, image: KeptReader, runs: Iterable[PageRun]) -> Iterator[PageRun]:
    """Yield the pages of an image that a target does not have already."""
    for run in runs:
        for first, end in differences(target, run.address, image.all_of(run)):
            yield PageRun(run.address + first, end - first)


def _superfluous(
    page_map: int, start: int, count: int, runs: Iterable[PageRun]
) -> Iterator[PageRun]:
    """Yield the pages of a process that are no file's and in none of `runs`."""
    kinds = _kinds(page_map, start, count)
    for address, size in runs:
        first, pages = (address - start) // PAGE_BYTES, size // PAGE_BYTES
        kinds[first : first + pages] = bytes(pages)
    for found in _PRESENT.finditer(kinds):
        yield PageRun(start + found.start() * PAGE_BYTES, len(found[0]) * PAGE_BYTES)

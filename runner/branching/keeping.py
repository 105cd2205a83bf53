"""`keep` and `restore`: a session's memory is written to a file, and a fresh cell made equal to it.

The file has the pages, then a head that says whose they are, then its size. An image is the whole
memory of a fresh cell; a kept session is the difference from an image. The supervisor seals the file
meanwhile. Even so it is hostile: a guest made most of it.
"""

import bisect
import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from . import layout
from .copying import (
    CHUNK_BYTES,
    COMPARED_BYTES,
    KINDS,
    MOST_COMPARED,
    OWN,
    PAGE_BYTES,
    RUNS,
    checked,
    differences,
    entries_of,
    is_equal,
    lay_out,
    read,
    stretches,
    unequal,
    wiped_of,
    write_pages,
)
from .kernel_state import (
    IDS,
    State,
    copy_limits,
    copy_state,
    require_copyable,
    require_equal,
    state_of,
)
from .layout import MAPS_BYTES, Mapping, NotCopyable
from .traced import Machine, Traced, machine, number_of

_MOST_RUNS = 1 << 18
_MOST_HEAD_BYTES = 32 << 20
_SIZE_BYTES = 8
_MOST_IMAGES = 2  # images that stay mapped


class PageRun(NamedTuple):
    """A run of adjacent pages."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size


class MappedFile(NamedTuple):
    """A file that a process has mapped, with the facts by which it is recognised later."""

    path: bytes
    inode: int
    size: int  # -1 if the size cannot be found
    modified_ns: int


class KeptMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The head: everything but the pages."""

    maps: Annotated[bytes, msgspec.Meta(max_length=MAPS_BYTES)]  # as /proc/PID/maps lists them
    state: State
    registers: bytes
    extended: bytes
    files: tuple[MappedFile, ...]
    runs: Annotated[tuple[PageRun, ...], msgspec.Meta(max_length=_MOST_RUNS)]  # in page order


_DECODER = msgspec.msgpack.Decoder(KeptMemory)


class KeptWriter:
    """Writes pages to a file, up to a number of bytes, and then the head."""

    def __init__(self, file: int, most_bytes: int) -> None:
        self._file = file
        self._left = most_bytes
        self.runs: list[PageRun] = []

    def add(self, address: int, data: bytes | bytearray) -> None:
        """Write pages; raises NotCopyable if there are too many."""
        self._left -= len(data)
        if self._left < 0:
            raise NotCopyable("it has more memory than may be kept")
        if self.runs and self.runs[-1].end == address:
            self.runs[-1] = PageRun(self.runs[-1].address, self.runs[-1].size + len(data))
        elif len(self.runs) == _MOST_RUNS:
            raise NotCopyable("its memory is scattered too widely")
        else:
            self.runs.append(PageRun(address, len(data)))
        _write(self._file, data)

    def finish(self, kept: KeptMemory) -> None:
        """Write the head; raises NotCopyable if it is too large, or a name in it is no text."""
        try:
            head = msgspec.msgpack.encode(kept)
        except UnicodeEncodeError:
            raise NotCopyable("the name of one of its files is not Unicode") from None
        if len(head) > _MOST_HEAD_BYTES:
            raise NotCopyable("its memory is scattered too widely")
        _write(self._file, head + len(head).to_bytes(_SIZE_BYTES, "little"))


class KeptReader:
    """Reads a kept file, which must not be shortened meanwhile; raises ValueError or
    msgspec.DecodeError if it is malformed."""

    def __init__(self, file: int, flags: int = mmap.MAP_SHARED) -> None:
        size = os.fstat(file).st_size
        if size < _SIZE_BYTES:
            raise ValueError("a kept memory without a head")
        self._mapped = memoryview(mmap.mmap(file, size, flags, mmap.PROT_READ))
        self.kept = self._read_head(size - _SIZE_BYTES)
        self._places = list(_places(self.kept.runs, self._pages_bytes))
        self._addresses = [each.address for each in self.kept.runs]

    def _read_head(self, end: int) -> KeptMemory:
        size = int.from_bytes(self._mapped[end:], "little")
        self._pages_bytes = end - size
        if size > _MOST_HEAD_BYTES or self._pages_bytes < 0:
            raise ValueError("a kept memory with a head that is too large")
        try:
            return _DECODER.decode(self._mapped[self._pages_bytes : end])
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through
            raise msgspec.DecodeError(str(error)) from None

    def content(self, address: int, size: int) -> memoryview | None:
        """Return the kept content of some pages; None unless all of them were kept in one run."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0 or self.kept.runs[at].end < address + size:
            return None
        place = self._places[at] + address - self._addresses[at]
        return self._mapped[place : place + size]

    def within(self, start: int, end: int) -> list[PageRun]:
        """Return the parts of its runs between two addresses."""
        first = max(0, bisect.bisect_right(self._addresses, start) - 1)
        found = list(self.kept.runs[first : bisect.bisect_left(self._addresses, end)])
        if found and found[0].address < start:
            found[:1] = [PageRun(start, found[0].end - start)] if found[0].end > start else []
        if found and found[-1].end > end:
            found[-1] = PageRun(found[-1].address, end - found[-1].address)
        return found

    def all_of(self, run: PageRun) -> memoryview:
        """Return the content of pages that were kept in one run."""
        data = self.content(run.address, run.size)
        assert data is not None  # noqa: S101 - of one run
        return data


class ImageReaders:
    """The readers of the last few images: an image is used again and again."""

    def __init__(self) -> None:
        self._readers: dict[tuple[int, ...], KeptReader] = {}

    def of(self, file: int) -> KeptReader:
        """Return the reader of an image, whose file must not change; raises as KeptReader does.

        A reader keeps its file in memory, so that no other one has the same number meanwhile.
        """
        seen = os.fstat(file)
        key = seen.st_dev, seen.st_ino, seen.st_size, seen.st_ctime_ns
        if key not in self._readers:
            for oldest in list(self._readers)[: 1 - _MOST_IMAGES]:
                del self._readers[oldest]
            self._readers[key] = KeptReader(file, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self._readers[key]


def _places(runs: Iterable[PageRun], size: int) -> Iterator[int]:
    """Yield where each run is in a file whose pages have `size` bytes."""
    at = end = 0
    for run in runs:
        yield at
        if run.address < end or run.size <= 0 or (run.address | run.size) % PAGE_BYTES:
            raise ValueError("a kept memory with other pages than it says")
        end = run.end
        at += run.size
    if at != size:
        raise ValueError("a kept memory with other pages than it says")


def without(runs: Iterable[PageRun], others: Iterable[PageRun]) -> Iterator[PageRun]:
    """Yield the parts of `runs` that are in none of `others`; both in order."""
    rest = iter(others)
    other = next(rest, None)
    for start, size in runs:
        end = start + size
        while other and other.address < end:
            if other.address > start:
                yield PageRun(start, other.address - start)
            start = max(start, other.end)
            if start > end:
                break
            other = next(rest, None)
        if start < end:
            yield PageRun(start, end - start)


def _write(file: int, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def files_of(process: Traced, mappings: Iterable[Mapping]) -> tuple[MappedFile, ...]:
    """Return the files that a process maps, as its cell sees them now."""
    inodes = {each.name: each.inode for each in mappings if each.is_file}
    return tuple(_file_of(process, path, inode) for path, inode in sorted(inodes.items()))


def _file_of(process: Traced, path: bytes, inode: int) -> MappedFile:
    """A path that leads elsewhere by now tells of another file: it is only compared."""
    try:
        status = os.stat(b"root" + path, dir_fd=process.directory, follow_symlinks=False)
    except (OSError, ValueError):
        return MappedFile(path, inode, -1, 0)
    return MappedFile(path, inode, status.st_size, status.st_mtime_ns)


_OF_IMAGE = 4  # a page of the image; in addition to the kinds of pages.py
_KEPT = bytes(OWN if kind == _OF_IMAGE or kind & OWN else kind & 1 for kind in range(8)) + bytes(
    248
)
_DONTNEED = 4  # madvise(2)
_ZEROS = bytes(PAGE_BYTES)
_PRESENT = re.compile(b"[^\0]+")  # runs of present pages, in the bytes that hold kinds of pages


def _known_machine() -> Machine:
    known = machine()
    if known is None:
        raise NotCopyable(f"branching by memory is not available on {os.uname().machine}")
    return known


def keep(guest: int, init: int, fresh: KeptReader | None, file: int, most_bytes: int) -> None:
    """Write the difference between a session's memory and that of a `fresh` cell to `file`, or the
    whole memory; the session goes on.

    `guest`, `init`: pidfds.  Raises NotCopyable with the reason why this session cannot be kept.
    """
    known = _known_machine()
    with contextlib.ExitStack() as opened:
        source = Traced(guest, known, is_source=True)
        opened.callback(source.close, dies=False)
        mappings, state = checked(source, number_of(init))
        if fresh:  # refuse now what no fresh cell could be given, while the session still lives
            require_copyable(state, fresh.kept.state)
            layout.changes(mappings, layout.parse(fresh.kept.maps))
        writer = KeptWriter(file, most_bytes)
        wiped = wiped_of(source, mappings)
        _keep_pages(source, [each for each in mappings if each not in wiped], fresh, writer)
        maps, files = source.text("maps", layout.MAPS_BYTES), files_of(source, mappings)
        source.require_living()  # if it has died, part of this may belong to another process
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
    """Yield runs of pages to keep, each with whether they are the process's own: its own pages, and
    pages of the image or of the launcher."""
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
    """Keep a process's own pages that differ from the image. Equal ones exist because each cell
    copies some pages before a program writes to them."""
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
        # The instruction comes first, because each injected call needs it.
        for run in _superfluous(page_map, start, count, (*of_image, *of_kept)):
            target.call("madvise", run.address, run.size, _DONTNEED)
        for run in _of_another(target, image, without(of_image, of_kept)):
            target.write(run.address, image.all_of(run))
        written += of_kept
    write_pages(target, written, [kept.all_of(run) for run in written])


def _of_another(target: Traced, image: KeptReader, runs: Iterable[PageRun]) -> Iterator[PageRun]:
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

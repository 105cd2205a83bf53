"""The memory of a session as a file: its pages, then a head that says whose they are, then its size.

An image is the same of a fresh cell, whole; what is kept of a session is how it differs from an image.
The supervisor seals the file meanwhile.  Even so it is hostile: a guest made most of it.
"""

import bisect
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from .layout import MAPS_BYTES, Mapping, NotCopyable
from .pages import PAGE_BYTES
from .state import State
from .traced import Traced

_MOST_RUNS = 1 << 18
_MOST_HEAD_BYTES = 32 << 20
_SIZE_BYTES = 8
_MOST_IMAGES = 2  # that stay mapped


class PageRun(NamedTuple):
    """Pages beside each other."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size


class MappedFile(NamedTuple):
    """A file that a process has mapped, and what tells that it is the same one later."""

    path: bytes
    inode: int
    size: int  # -1: it cannot be found
    modified_ns: int


class KeptMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The head: everything but the pages."""

    maps: Annotated[bytes, msgspec.Meta(max_length=MAPS_BYTES)]  # as /proc/PID/maps lists them
    state: State
    registers: bytes
    extended: bytes
    files: tuple[MappedFile, ...]
    runs: Annotated[
        tuple[PageRun, ...], msgspec.Meta(max_length=_MOST_RUNS)
    ]  # in the order of pages


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
    """Reads such a file, which nobody shortens meanwhile; raises ValueError, or msgspec.DecodeError,
    where it is malformed."""

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
        except (UnicodeDecodeError, RecursionError) as error:  # what msgspec lets through
            raise msgspec.DecodeError(str(error)) from None

    def content(self, address: int, size: int) -> memoryview | None:
        """Return what was kept of some pages, None unless it was all of them in one run."""
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
        """Return the reader of an image, whose file nobody changes; raises as KeptReader does.

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

"""Pages: which of them differ, and how they are read from one process and written to another."""

import ctypes
import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from cellwright.runner.branching import copying as pages
from cellwright.runner.branching.copying import (
    COMPARED_BYTES,
    OWN,
    PAGE_BYTES,
    SHARED,
    Transfers,
    differences,
    write_pages,
)
from cellwright.runner.branching.layout import Mapping
from cellwright.runner.branching.traced import Traced
from tests.forked import forked

_LIBC = ctypes.CDLL(None)
AT = 16  # the number of the first page
PRESENT, SWAPPED, OF_FILE, ONCE = 1 << 63, 1 << 62, 1 << 61, 1 << 56
OF_SOURCE_ALONE = 4 | OWN | SHARED  # there, and shared by the others
# Entries of the source and of two targets, and what is to be done about the page.
ENTRIES = {
    "in no process": (0, 0, 0, 0),
    "of a file in all": (PRESENT | OF_FILE | 7, PRESENT | OF_FILE | ONCE | 8, 0, 0),
    "shared at one place": (PRESENT | 7, PRESENT | 7, PRESENT | 7, 0),
    "shared at two places": (PRESENT | 7, PRESENT | 7, PRESENT | 8, SHARED),
    "shared, with an unknown place": (PRESENT, PRESENT, PRESENT, SHARED),
    "shared, and in one target not there": (PRESENT | 7, PRESENT | 7, 0, SHARED),
    "the source's own": (PRESENT | ONCE | 7, PRESENT | 8, PRESENT | 8, OF_SOURCE_ALONE),
    "the source's own, swapped": (SWAPPED | 7, PRESENT | 8, PRESENT | 8, OF_SOURCE_ALONE),
    # Such a page of the source must not be pinned: it would get a copy of its own.
    "a target's own": (PRESENT | 7, PRESENT | 7, PRESENT | ONCE | 8, OWN | SHARED),
    "a target's own alone": (0, 0, PRESENT | ONCE | 8, OWN),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_differs_is_told_by_the_page_maps(name: str) -> None:
    *entries, expected = ENTRIES[name]
    maps = [os.memfd_create("pagemap") for _ in entries]
    for file, entry in zip(maps, entries, strict=True):
        os.pwrite(file, entry.to_bytes(8, "little"), (AT + 1) * 8)
        os.ftruncate(file, (AT + 3) * 8)
    start = AT * PAGE_BYTES
    mapping = Mapping(start, start + 3 * PAGE_BYTES, "rw-p", 0, "00:00", 0, b"")
    found = list(pages._differing(tuple(maps), [mapping]))
    for file in maps:
        os.close(file)
    assert found == ([(start + PAGE_BYTES, PAGE_BYTES, expected)] if expected else [])


def test_a_process_that_was_killed_is_not_taken_for_one_without_pages() -> None:
    with forked(wait) as process:
        page_map = os.open(f"/proc/{process.pid}/pagemap", os.O_RDONLY)
    with pytest.raises(ProcessLookupError):
        pages.entries_of(page_map, AT * PAGE_BYTES, 1)
    os.close(page_map)


class Memory(Traced):
    """A process's memory, without its being stopped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        self._opened = [self._memory]
        self._is_stopped = False


def wait() -> None:
    while True:
        signal.pause()


PAGES = 40
SIZE = PAGES * PAGE_BYTES


class Region:
    """Memory of this process and, once it is forked, of a child at the same address."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for n in range(PAGES):
            self.memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] = bytes((n,)) * PAGE_BYTES
        self._array = (ctypes.c_char * SIZE).from_buffer(self.memory)
        self.address = ctypes.addressof(self._array)


@pytest.fixture(scope="module")
def region() -> Region:
    return Region()


@pytest.fixture
def child(region: Region) -> Iterator[Memory]:
    """A child, to whom the eighth page of the region is closed."""
    ready, told = os.pipe()

    def close_page() -> None:
        _LIBC.mprotect(ctypes.c_void_p(region.address + 8 * PAGE_BYTES), PAGE_BYTES, 0)
        os.write(told, b"x")
        wait()

    with forked(close_page) as started:
        os.close(told)
        assert os.read(ready, 1)
        os.close(ready)
        process = Memory(started.pid)
        yield process
        process.close(dies=False)


def test_pages_that_differ_are_found_in_runs(region: Region, child: Memory) -> None:
    content = bytearray(region.memory[:])
    assert list(differences(child, region.address, bytes(content))) == []
    at_once = COMPARED_BYTES // PAGE_BYTES
    for n in (0, 3, 4, at_once - 1, at_once, PAGES - 1):
        content[n * PAGE_BYTES + 5] ^= 1
    found = [
        (first // PAGE_BYTES, end // PAGE_BYTES)
        for first, end in differences(child, region.address, memoryview(content))
    ]
    assert found == [
        (0, 1), (3, 5), (at_once - 1, at_once), (at_once, at_once + 1), (PAGES - 1, PAGES),
    ]  # fmt: skip


@pytest.mark.parametrize("most_places", [1, 3, 1024])
def test_pages_are_copied_also_where_a_process_has_no_right(
    region: Region, child: Memory, monkeypatch: pytest.MonkeyPatch, most_places: int
) -> None:
    """The eighth page can be read by /proc/PID/mem alone."""
    monkeypatch.setattr(pages, "MOST_PLACES", most_places)
    places = [2, 5, 8, 9, 17]
    copy = Transfers(child, (child,))
    for n in places:
        child.write(region.address + n * PAGE_BYTES, b"s" * PAGE_BYTES)
        copy.copy(region.address + n * PAGE_BYTES, PAGE_BYTES)
    copy.flush()
    addresses = [region.address + n * PAGE_BYTES for n in (1, 8, 30)]
    content = [memoryview(bytearray(b"w") * (2 * PAGE_BYTES)) for _ in addresses]
    write_pages(child, [(each, 2 * PAGE_BYTES) for each in addresses], content)
    for n in range(PAGES):
        expected = b"w" if n in (1, 2, 8, 9, 30, 31) else b"s" if n in places else bytes((n,))
        assert child.read(region.address + n * PAGE_BYTES, PAGE_BYTES) == expected * PAGE_BYTES


def test_a_large_copy_is_made_in_parts(
    region: Region, child: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 3 * PAGE_BYTES)
    content = os.urandom(7 * PAGE_BYTES)
    for first in (10, 20):
        child.write(region.address + first * PAGE_BYTES, content)
    with forked(wait) as started:
        other = Memory(started.pid)
        copy = Transfers(child, (other,))
        for first in (10, 20):
            copy.copy(region.address + first * PAGE_BYTES, len(content))
        copy.flush()
        for first in (10, 20):
            assert other.read(region.address + first * PAGE_BYTES, len(content)) == content
        assert other.read(region.address + 17 * PAGE_BYTES, 1) == bytes((17,))
        other.close(dies=False)


def test_a_place_that_is_not_there_is_an_error(region: Region, child: Memory) -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    for nowhere in (0, region.address + (1 << 46)):
        places = [(region.address, PAGE_BYTES), (nowhere, PAGE_BYTES)]
        with pytest.raises(OSError, match="[Ee]rror|allocate"):
            write_pages(child, places, [page, page])

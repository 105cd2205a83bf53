"""The kept memory of a session as a file: written, read, and refused where it is malformed."""

import os
import struct
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.runner.branching import keeping
from cellwright.runner.branching.copying import PAGE_BYTES
from cellwright.runner.branching.keeping import KeptMemory, KeptReader, KeptWriter, PageRun, without
from cellwright.runner.branching.kernel_state import State
from cellwright.runner.branching.layout import NotCopyable

STATE = State({}, "/workspace", (), b"guest", (), frozenset({0}), 0, ())
AT = 0x7000_0000_0000
NOWHERE = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)


def memory(runs: tuple[PageRun, ...] = ()) -> KeptMemory:
    return KeptMemory(b"", STATE, b"r", b"x", (), runs)


def written(*pages: int) -> int:
    """Return a file with pages at these places, each full of its number."""
    file = os.memfd_create("kept")
    writer = KeptWriter(file, 1 << 30)
    for number in pages:
        writer.add(AT + number * PAGE_BYTES, bytes([number]) * PAGE_BYTES)
    writer.finish(memory(tuple(writer.runs)))
    return file


def test_pages_beside_each_other_are_one_run() -> None:
    reader = KeptReader(written(1, 2, 5))
    if reader:
        runs = [(each.address - AT, each.size // PAGE_BYTES) for each in reader.kept.runs]
        assert runs == [(PAGE_BYTES, 2), (5 * PAGE_BYTES, 1)]
        assert reader.content(AT + 2 * PAGE_BYTES, PAGE_BYTES) == b"\2" * PAGE_BYTES
        assert reader.content(AT + 5 * PAGE_BYTES, PAGE_BYTES) == b"\5" * PAGE_BYTES
        for address, size in ((AT, 1), (AT + 2 * PAGE_BYTES, 2), (AT + 6 * PAGE_BYTES, 1)):
            assert reader.content(address, size * PAGE_BYTES) is None
        inside = reader.within(AT + 2 * PAGE_BYTES, AT + 9 * PAGE_BYTES)
        assert inside == [
            PageRun(AT + 2 * PAGE_BYTES, PAGE_BYTES),
            PageRun(AT + 5 * PAGE_BYTES, PAGE_BYTES),
        ]
        assert reader.within(AT + 3 * PAGE_BYTES, AT + 5 * PAGE_BYTES) == []
        inner = PageRun(AT + 2 * PAGE_BYTES, PAGE_BYTES)
        assert reader.within(inner.address, inner.end) == [inner]


def test_no_more_bytes_or_runs_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = KeptWriter(os.memfd_create("kept"), 2 * PAGE_BYTES)
    writer.add(AT, bytes(PAGE_BYTES))
    monkeypatch.setattr(keeping, "_MOST_RUNS", 1)
    with pytest.raises(NotCopyable, match="scattered"):
        writer.add(AT + 9 * PAGE_BYTES, bytes(PAGE_BYTES))
    with pytest.raises(NotCopyable, match="more memory"):
        writer.add(AT + PAGE_BYTES, bytes(PAGE_BYTES))


def test_a_name_that_is_not_unicode_is_refused() -> None:
    writer = KeptWriter(os.memfd_create("kept"), PAGE_BYTES)
    with pytest.raises(NotCopyable, match="Unicode"):
        writer.finish(KeptMemory(b"", STATE._replace(directory="/\udcff"), b"", b"", (), ()))


MALFORMED = {
    "other order": (PageRun(AT + PAGE_BYTES, PAGE_BYTES), PageRun(AT, PAGE_BYTES)),
    "overlapping": (PageRun(AT, PAGE_BYTES), PageRun(AT, PAGE_BYTES)),
    "too few": (PageRun(AT, PAGE_BYTES),),
    "too many": (PageRun(AT, 3 * PAGE_BYTES),),
    "no whole page": (PageRun(AT, PAGE_BYTES + 1), PageRun(AT + 2 * PAGE_BYTES, PAGE_BYTES - 1)),
    "negative": (PageRun(AT, 3 * PAGE_BYTES), PageRun(AT + 4 * PAGE_BYTES, -PAGE_BYTES)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_other_pages_than_the_head_says_are_refused(name: str) -> None:
    file = os.memfd_create("kept")
    writer = KeptWriter(file, 1 << 20)
    writer.add(AT, bytes(2 * PAGE_BYTES))
    writer.finish(memory(MALFORMED[name]))
    with pytest.raises(ValueError, match="other pages"):
        KeptReader(file)


@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_any_other_file_is_refused(data: bytes, size: int) -> None:
    file = os.memfd_create("kept")
    try:
        os.write(file, data + struct.pack("<Q", size))
        with pytest.raises((ValueError, msgspec.DecodeError)):
            KeptReader(file)
    finally:
        os.close(file)


PAGES = st.sets(st.integers(0, 30))


def runs_of(pages: set[int]) -> list[PageRun]:
    writer = KeptWriter(NOWHERE, 1 << 30)
    for page in sorted(pages):
        writer.add(page * PAGE_BYTES, bytes(PAGE_BYTES))
    return writer.runs


def pages_of(runs: Iterable[PageRun]) -> set[int]:
    return {
        page for run in runs for page in range(run.address // PAGE_BYTES, run.end // PAGE_BYTES)
    }


@given(PAGES, st.integers(0, 31), st.integers(0, 31))
def test_the_runs_within_a_stretch_are_its_pages(ours: set[int], one: int, other: int) -> None:
    start, end = min(one, other), max(one, other) + 1
    file = os.memfd_create("kept")
    writer = KeptWriter(file, 1 << 30)
    for page in sorted(ours):
        writer.add(page * PAGE_BYTES, bytes(PAGE_BYTES))
    writer.finish(memory(tuple(writer.runs)))
    found = KeptReader(file).within(start * PAGE_BYTES, end * PAGE_BYTES)
    os.close(file)
    assert pages_of(found) == ours & set(range(start, end))
    assert all(run.size > 0 for run in found)


@given(PAGES, PAGES)
def test_runs_without_others_are_what_is_left(ours: set[int], others: set[int]) -> None:
    assert pages_of(without(runs_of(ours), runs_of(others))) == ours - others


@given(PAGES, PAGES)
def test_own_pages_that_are_as_in_the_image_are_not_kept(own: set[int], alike: set[int]) -> None:
    image = KeptReader(written(*range(5, 25)))
    data = bytearray()
    for page in range(31):
        data += bytes([page if page in alike else 99]) * PAGE_BYTES
    writer = KeptWriter(NOWHERE, 1 << 30)
    for run in runs_of(own):
        part = data[run.address : run.end]
        keeping._keep_own(AT + run.address, part, image, writer)
    kept = [PageRun(each.address - AT, each.size) for each in writer.runs]
    assert pages_of(kept) == own - (alike & set(range(5, 25)))

"""Reading the files of a session that change meanwhile, without any cell."""

import os
from collections.abc import Iterator

import pytest

from cellwright.runner.cells import tree_copy
from cellwright.runner.cells.tree_copy import Uncopied

MEGABYTE = 1 << 20


@pytest.fixture
def opened() -> Iterator[int]:
    """A file on a tmpfs, as those of cells are."""
    file = os.memfd_create("file")
    yield file
    os.close(file)


def test_a_file_is_read_whole_but_for_its_holes(opened: int) -> None:
    os.pwrite(opened, b"begin", 0)
    os.pwrite(opened, b"end", 40 * MEGABYTE)
    found = list(tree_copy._content(opened, os.fstat(opened)))
    page = os.sysconf("SC_PAGESIZE")
    assert found == [(0, b"begin".ljust(page, b"\0")), (40 * MEGABYTE, b"end")]


def test_a_file_that_grows_is_not_read_for_ever(opened: int) -> None:
    os.truncate(opened, 1 << 40)
    before = os.fstat(opened)
    os.pwrite(opened, b"more", 5 * MEGABYTE)
    with pytest.raises(Uncopied, match="change"):
        list(tree_copy._content(opened, before))


def test_a_file_that_is_cut_while_it_is_read_is_not_copied(opened: int) -> None:
    size = tree_copy._BATCH_BYTES + MEGABYTE
    os.pwrite(opened, b"x" * size, 0)
    pieces = tree_copy._content(opened, os.fstat(opened))
    next(pieces)
    os.truncate(opened, 0)
    with pytest.raises(Uncopied, match="change"):
        next(pieces)

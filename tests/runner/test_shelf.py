"""Files on the shelf, in real directories."""

import os
from pathlib import Path

import pytest

from cellwright.runner.shelf import Shelf


def files(directory: Path) -> set[str]:
    return {str(each.relative_to(directory)) for each in directory.rglob("*") if each.is_file()}


def test_what_could_not_be_laid_is_in_nobodys_way(tmp_path: Path) -> None:
    """A name that no filesystem takes stands for a tree that does not fit."""
    shelf = Shelf()
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    shelf.admit(directory)
    shelf.lay({"a/first": "1", "b": "2"})
    for _ in range(2):
        with pytest.raises(OSError, match="too long"):
            shelf.lay({"c/second": "3", "c/" + "x" * 300: "4", "d/third": "5"})
    assert files(tmp_path) == {"c/second"}
    shelf.lay({"b": "6", "e/fourth": "7"})
    assert files(tmp_path) == {"b", "e/fourth"}
    assert (tmp_path / "b").read_text() == "6"
    shelf.dismiss(directory)
    shelf.dismiss(directory)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(directory)

"""Shared files, in real directories."""

import os
from pathlib import Path

import pytest

from cellwright.runner.shared_files import SharedFiles


def files(directory: Path) -> set[str]:
    return {str(each.relative_to(directory)) for each in directory.rglob("*") if each.is_file()}


def test_a_failed_change_does_not_hinder_the_next_one(tmp_path: Path) -> None:
    """A name that no filesystem takes stands for a tree that does not fit."""
    shared_files = SharedFiles()
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    shared_files.attach(directory)
    shared_files.replace({"a/first": "1", "b": "2"})
    for _ in range(2):
        with pytest.raises(OSError, match="too long"):
            shared_files.replace({"c/second": "3", "c/" + "x" * 300: "4", "d/third": "5"})
    assert files(tmp_path) == {"c/second"}
    shared_files.replace({"b": "6", "e/fourth": "7"})
    assert files(tmp_path) == {"b", "e/fourth"}
    assert (tmp_path / "b").read_text() == "6"
    shared_files.detach(directory)
    shared_files.detach(directory)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(directory)

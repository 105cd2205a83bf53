"""Locks and writes of files that several commands of one user change."""

from pathlib import Path

import pytest

from cellwright.harness.mcp.definitions import Pins
from cellwright.harness.user_data import locked, replace_file
from cellwright.policies.errors import RegistryError


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """The link would make a file wherever it leads."""
    pins, target = tmp_path / "pins.json", tmp_path / "elsewhere"
    lock = pins.with_name("pins.json.lock")
    with Pins(pins)._locked():
        assert lock.is_file()
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(RegistryError, match="cannot write"), Pins(pins)._locked():
        pass
    assert not target.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with locked(tmp_path / "lock", RegistryError):
        replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "directory", b"new")
    assert {each.name for each in tmp_path.iterdir()} == {"file", "lock", "directory"}

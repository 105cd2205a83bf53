"""Scratch directories of benchmarks that were killed are removed, and those in use are not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cellwright.benchmarks import scratch

_KILLED = (
    "import os, signal; from cellwright.benchmarks.scratch import scratch_directory\n"
    "with scratch_directory() as made: os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_is_gone_at_the_end(place: Path) -> None:
    with scratch.scratch_directory() as made:
        (made / "file").touch()
    assert os.listdir(place) == []


def test_a_directory_in_use_is_kept(place: Path) -> None:
    with scratch.scratch_directory() as made:
        assert scratch.remove_stale() == []
        assert made.exists()


def test_the_directory_of_a_killed_process_is_removed(place: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED], env=os.environ | {"TMPDIR": str(place)}, check=False)  # fmt: skip
    left = os.listdir(place)
    assert len(left) == 1
    assert scratch.remove_stale() == left
    assert os.listdir(place) == []


def test_what_is_not_a_directory_of_benchmarks_is_kept(place: Path) -> None:
    (place / "other").mkdir()
    (place / f"{scratch.PREFIX}file").touch()
    (place / f"{scratch.PREFIX}link").symlink_to(place / "other")
    assert scratch.remove_stale() == []
    assert len(os.listdir(place)) == 3

"""Files of the host with names that a guest chose."""

import os
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.cli.running.artifacts import write_artifacts
from cellwright.results import Artifact


def written(name: str, directory: Path, data: bytes = b"data", *, overwrite: bool = False) -> str:
    (path,) = write_artifacts([Artifact(name, "", data)], str(directory), overwrite=overwrite)
    assert Path(path).read_bytes() == data
    return os.path.relpath(path, directory)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("plots/a b.png", "plots/a b.png"),
        ("../../out", "__/__/out"),
        ("/etc/passwd", "_/etc/passwd"),
        (".bashrc", "_bashrc"),
        ("-rf", "_rf"),
        ("a\n\x1b[2Jb", "a___2Jb"),
        ("\u202egpj.exe", "_gpj.exe"),
        ("\u00fc", "\u00fc"),
        ("x" * 300, "x" * 200),
    ],
)
def test_a_name_becomes_a_harmless_one(tmp_path: Path, name: str, kept: str) -> None:
    assert written(name, tmp_path / "new") == kept
    assert os.listdir(tmp_path) == ["new"]


def test_what_exists_is_not_touched_unless_that_was_asked_for(tmp_path: Path) -> None:
    assert [written("a.png", tmp_path, str(n).encode()) for n in range(3)] == [
        "a.png",
        "a-2.png",
        "a-3.png",
    ]
    assert (tmp_path / "a.png").read_bytes() == b"0"
    assert written("a.png", tmp_path, b"new", overwrite=True) == "a.png"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_is_never_followed(tmp_path: Path, overwrite: bool) -> None:
    directory, outside = tmp_path / "out", tmp_path / "precious"
    directory.mkdir()
    outside.write_text("mine")
    (directory / "a").symlink_to(outside)
    (directory / "d").symlink_to(tmp_path)
    written("a", directory, overwrite=overwrite)
    assert outside.read_text() == "mine"
    with pytest.raises(PolicyError, match="cannot write artifacts"):
        written("d/precious", directory, overwrite=overwrite)
    assert outside.read_text() == "mine"


def test_names_that_become_one_are_numbered_without_looking_for_each_number_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = os.open

    def count(path: str, *given: Any, **named: Any) -> int:
        opened.append(path)
        return real(path, *given, **named)

    names = ["".join(chr(1 + (n >> shift & 3)) for shift in range(0, 10, 2)) for n in range(300)]
    artifacts = [Artifact(f"d/{name}", "", b"") for name in names]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "_____-2").touch()
    monkeypatch.setattr(os, "open", count)
    paths = list(write_artifacts(artifacts, str(tmp_path)))
    assert len(set(paths)) == 300
    assert len(opened) <= 4 * 300

"""The command that installs an extra into the environment of this Python."""

import sys
from pathlib import Path

import pytest

from cellwright.policies.extras import how_to_install
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("mark", "command"),
    [
        ("pipx_metadata.json", "pipx install --force '.[web]', with the other extras"),
        ("uv-receipt.toml", "uv tool install --force '.[web]', with the other extras"),
        ("pyvenv.cfg", f"{sys.executable} -m pip install '.[web]'"),
    ],
)
def test_the_command_reaches_the_environment_of_this_python(
    mark: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / mark).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert how_to_install("web").startswith(f"in the checkout of cellwright: {command}")


@pytest.mark.parametrize(
    ("mark", "command"),
    [
        ("pipx_metadata.json", "pipx install --force --pip-args='--no-index --find-links wheels' 'cellwright[web]', with"),
        ("uv-receipt.toml", "uv tool install --force --no-index --find-links wheels 'cellwright[web]', with"),
        ("pyvenv.cfg", "-m pip install --no-index --find-links wheels 'cellwright[web]'"),
    ],
)  # fmt: skip
def test_what_was_installed_from_wheels_needs_no_checkout(
    mark: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / mark).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(
        "importlib.metadata.PathDistribution.locate_file", lambda _, name: tmp_path / name
    )
    for origin in (None, '{"archive_info": {}, "url": "file:///wheels/cellwright.whl"}'):
        monkeypatch.setattr("importlib.metadata.Distribution.read_text", lambda *_, o=origin: o)
        monkeypatch.setattr("importlib.metadata.PathDistribution.read_text", lambda *_, o=origin: o)
        told = how_to_install("web")
        assert (command in told, "checkout" in told) == (True, False), told


def test_an_environment_without_pip_is_reached_by_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"uv pip install --python {sys.executable} '.[web]'" in how_to_install("web")


def test_no_text_tells_to_install_an_extra_from_an_index() -> None:
    """INSTALL.md has one such command, which installs from a folder of wheels."""
    texts = [
        path for folder in ("harness", "runner", "policies") for kind in ("*.py", "*.md")
        for path in (ROOT / folder).rglob(kind)
    ]  # fmt: skip
    found = [
        (path.name, line) for path in texts for line in path.read_text().splitlines()
        if "install 'cellwright[" in line
    ]  # fmt: skip
    assert [name for name, line in found if "--no-index" not in line] == []

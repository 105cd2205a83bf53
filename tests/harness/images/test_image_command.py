"""`cellwright image`: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest

from cellwright.harness.cli.main import main
from tests.harness.images.layers import archive, layout, member
from tests.harness.images.registry_server import RegistryServer

pytestmark = pytest.mark.needs("userns")
FILE = archive(member("etc/motd", b"hello"))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def image(*words: str, status: int = 0) -> None:
    assert main(["image", *words]) == status


def test_an_image_is_imported_listed_shown_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = layout(tmp_path / "image", FILE, Env=["A=b\x1b[31m"], Cmd=["sh", "-l"], User="www")
    image("import", str(path), "tests/app:1")
    digest = capsys.readouterr().out.strip()
    image("list")
    assert capsys.readouterr().out.split() == [digest[7:19], "0.0", "1", "tests/app:1"]
    image("list", "--json")
    assert json.loads(capsys.readouterr().out)[0]["digest"] == digest
    image("show", "tests/app:1")
    shown = capsys.readouterr().out
    assert f"digest     {digest}\nname       tests/app:1\n" in shown
    assert "user       www\n" in shown
    assert "command    sh -l\n" in shown
    assert "variable   A=b\\x1b[31m\n" in shown
    image("show", "tests/app:1", "--json")
    assert json.loads(capsys.readouterr().out)["config"]["user"] == "www"
    image("import", str(path), "other")
    image("remove", "tests/app:1", "other")
    image("prune", "--json")
    assert capsys.readouterr().out.endswith("[]\n")
    image("list", "--json")
    assert capsys.readouterr().out == "[]\n"


def test_an_image_is_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = RegistryServer()
    try:
        name = registry.add(
            "app:1", layout(tmp_path / "image", FILE), os="linux", architecture="s390x"
        )
        image("pull", name, "--platform", "linux/s390x", "--json")
        assert json.loads(capsys.readouterr().out)["names"] == [name]
    finally:
        registry.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("show", "nothing"), "'nothing' is not in the store"),
        (("remove", "nothing"), "'nothing' is not in the store"),
        (("import", "/nowhere"), "/nowhere: No such file or directory"),
        (("import", "/dev/null"), "/dev/null: not a regular file"),
        (("import", "/"), "/ is the host itself"),
        (("pull", "No Name"), "invalid name 'No Name'"),
        (("pull", "a", "--platform", "windows/amd64"), "--platform: must be linux/MACHINE"),
    ],
)
def test_wrong_usage_is_told(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image(*words, status=2)
    assert why in capsys.readouterr().err

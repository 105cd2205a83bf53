"""`cellwright servers`, and `cellwright run --servers`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellwright.harness.cli.main import main
from tests.conftest import OPTIONAL, ROOT

from .conftest import Fake, Serve, tool


def options_of(fake: Fake) -> list[str]:
    path = fake.folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"fake": fake.given}}))
    return ["--servers", str(path), "--pins", str(fake.folder / "pins.json")]


def test_servers_are_looked_at_and_pinned(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    fake = serve("echo", tool("drop", annotations={"destructiveHint": True}))
    options = options_of(fake)

    def said(*arguments: str, status: int = 0) -> str:
        assert main(["servers", arguments[0], *options, *arguments[1:]]) == status
        return capsys.readouterr().out

    assert "fake  configured, on the host: python" in said("list")
    assert fake.starts == 0
    assert said("tools") == ("fake.drop  [needs approval]  Does drop.\nfake.echo  Does echo.\n")
    told: list[dict[str, Any]] = json.loads(said("tools", "fake", "--json"))
    assert [each["wire_name"] for each in told] == ["drop", "echo"]
    assert json.loads(said("call", "fake.echo", '{"a": 1}')) == '{"a": 1}'
    hidden = said(
        "call", "fake.echo", json.dumps({"a": "\u202e\U000e0041\x9b"}, ensure_ascii=False)
    )
    assert hidden.isascii()
    assert said("call", "fake.drop", status=1) == ""
    said("call", "fake.drop", "--yes", status=1)  # it is called: the fake does not know it
    assert said("diff") == ""
    fake.list([tool("echo", description="Changed.")])
    assert '+  "description": "Changed."' in said("diff", status=1)
    assert "changed: 'echo'; removed: 'drop'" in said("check", status=1)
    assert json.loads(said("check", "--json", status=1))[0]["drift"]["changed"] == ["echo"]
    assert said("pin", "fake") == "changed: 'echo'; removed: 'drop'\n"
    assert said("diff", "fake") == ""
    assert "ready, on the host" in said("check", "fake")


def test_what_cannot_be_done_is_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(serve(mode="exit"))
    assert main(["servers", "tools", *options]) == 1
    assert "no such database" in capsys.readouterr().err
    assert main(["servers", "call", *options, "fake.echo", "[]"]) == 2
    assert main(["servers", "pin", *options, "other"]) == 2
    assert main(["servers", "list", "--servers", "/nowhere"]) == 2


@pytest.mark.needs("cgroup")
def test_a_program_has_the_tools_of_servers(serve: Serve) -> None:
    code = "from tools import fake\nfake.echo(a=[1, 2])"
    optional = [each for layer in OPTIONAL for each in ("--optional", layer)]
    argv = ["run", *options_of(serve("echo")), *optional, "--json", "-c", code]
    done = subprocess.run(
        (sys.executable, "-m", "cellwright", *argv), cwd=ROOT, capture_output=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["value"] == '{"a": [1, 2]}'


def test_a_daemon_has_servers_of_its_own(tmp_path: Path) -> None:
    argv = ["run", "--connect", "/nowhere", "--servers", "x", "-c", ""]
    assert main(argv) == 2


@pytest.mark.parametrize("arguments", [["servers", "list", "--servers", "none.json"], ["mcp"]])
def test_without_the_sdk_it_is_said_what_to_install(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(arguments) == 2
    assert "'.[mcp]'" in capsys.readouterr().err

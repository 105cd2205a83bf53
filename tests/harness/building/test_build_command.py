"""`cellwright image build`: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest

from cellwright.harness.cli.main import main
from cellwright.harness.sandbox.building.image_build import build_policy

pytestmark = pytest.mark.needs("userns")


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "context").mkdir()
    return tmp_path / "context"


def build(context: Path, text: str, *options: str) -> int:
    (context / "Dockerfile").write_text(text)
    return main(["image", "build", str(context), *options])


def test_steps_and_the_digest_are_printed(
    context: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (context / "motd").write_text("hello")
    text = "ARG A\nFROM scratch AS one\nARG A B\nCOPY motd /etc/\nENV A=$A B=$B\nFROM scratch\n"
    monkeypatch.setenv("B", "of the environment")
    options = ("-t", "made:1", "--target", "one", "--build-arg", "A=1", "--build-arg", "B")
    assert build(context, text, *options, "--build-arg", "C=3") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("sha256:")
    assert "[one 2/3] COPY motd /etc/\n[one 2/3] done in " in printed.err
    assert "no ARG takes the value of C\n" in printed.err
    assert build(context, text, *options, "--json") == 0
    again = capsys.readouterr()
    assert "[one 2/3] cached\n" in again.err
    told = json.loads(again.out)
    assert (told["digest"], told["names"]) == (printed.out.strip(), ["made:1"])
    assert told["config"]["env"] == ["A=1", "B=of the environment"]
    assert build(context, text, *options, "--no-cache") == 0
    assert "cached" not in capsys.readouterr().err


def test_an_error_has_status_2_and_names_its_line(
    context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(context, "FROM scratch\n\nHEALTHCHECK NONE\n") == 2
    assert "cellwright: Dockerfile:3: 'HEALTHCHECK' is not supported" in capsys.readouterr().err
    assert build(context, "FROM scratch\n", "--allow", "example.org:x") == 2
    assert build(context, "FROM scratch\n", "-f", str(context / "absent")) == 2


def test_allowed_hosts_are_added_to_the_policy() -> None:
    policy = build_policy(None, ("example.org", "a.example.org:8080@10.1.0.0/16"))
    first, second = policy.network.allow
    assert (first.host, first.ports, first.addresses) == ("example.org", (80, 443), ())
    assert (second.ports, second.addresses) == ((8080,), ("10.1.0.0/16",))
    assert build_policy(None).network.allow == ()

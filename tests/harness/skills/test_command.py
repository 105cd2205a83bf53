"""`cellwright skills`."""

import json
from pathlib import Path

import pytest

from cellwright.harness.cli.main import main
from cellwright.harness.skills.skill import read_skill

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def said(capture: Capture, *words: str, status: int = 0) -> str:
    assert main(["skills", *words]) == status
    out, err = capture.readouterr()
    return out if not status else err


def test_a_skill_from_new_to_removed(capsys: Capture, tmp_path: Path) -> None:
    said(
        capsys,
        "new",
        "pdf-forms",
        "--in",
        ".agents/skills",
        "--description",
        "Fills forms of PDFs.",
    )
    reference = said(capsys, "check", ".agents/skills/pdf-forms").strip()
    assert f"{reference} untrusted" in said(capsys, "show", "pdf-forms")
    assert main(["skills", "search", "forms"]) == 0
    out, err = capsys.readouterr()
    assert (out, "no skill is trusted: see `cellwright skills list`" in err) == ("", True)
    assert said(capsys, "trust", reference) == f"{reference} trusted\n"
    assert "pdf-forms" in said(capsys, "search", "forms")
    (found,) = json.loads(said(capsys, "list", "--json"))
    assert (found["hash"], found["is_trusted"]) == (reference[-32:], True)
    assert "kept as version 1" in said(capsys, "import", ".agents/skills/pdf-forms")
    out = said(capsys, "export", "pdf-forms", str(tmp_path / "out")).strip()
    assert said(capsys, "check", out).strip() == reference
    said(capsys, "remove", "pdf-forms")
    assert not json.loads(said(capsys, "list", "--json"))[0]["is_trusted"]
    assert "nor" not in said(capsys, "prune", "--days", "1")


def test_in_the_home_directory_a_skill_is_listed_once(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    said(capsys, "new", "demo")
    assert len(json.loads(said(capsys, "list", "--json"))) == 1


def test_trust_is_given_to_a_digest_that_is_there(capsys: Capture) -> None:
    said(capsys, "new", "demo", "--in", ".agents/skills")
    assert "NAME@HASH" in said(capsys, "trust", "demo", status=2)
    assert "there is demo@" in said(capsys, "trust", "demo@" + "0" * 32, status=2)
    assert "was not trusted" in said(capsys, "trust", "--revoke", "demo@" + "0" * 32, status=2)


def test_check_says_what_is_wrong(capsys: Capture, tmp_path: Path) -> None:
    said(capsys, "new", "demo", "--in", ".")
    text = Path("demo/SKILL.md").read_text()
    Path("demo/SKILL.md").write_text(text.replace("---\n\n", 'extra: "1"\n---\n\n'))
    assert "unknown field 'extra'" in said(capsys, "check", "demo", status=1)
    Path("demo/link").symlink_to("/etc/passwd")
    assert "a link" in said(capsys, "check", "demo", status=1)
    assert "a link" in said(capsys, "import", "demo", status=2)


def test_show_writes_what_could_deceive_as_escapes(capsys: Capture) -> None:
    said(capsys, "new", "demo", "--in", ".agents/skills")
    with open(".agents/skills/demo/SKILL.md", "a") as file:
        file.write("one" + "\n" * 40 + "two \x1b[2J\u202e")
    told = said(capsys, "show", "demo")
    assert "⟨39 blank lines⟩" in told
    assert "\\x1b[2J\\u202e" in told


def test_an_invalid_skill_is_listed_with_its_problem(capsys: Capture) -> None:
    Path(".agents/skills/evil").mkdir(parents=True)
    Path(".agents/skills/evil/SKILL.md").symlink_to("/etc/passwd")
    assert "invalid" in said(capsys, "list")
    assert "a link" in said(capsys, "show", "evil", status=2)


@pytest.mark.needs("cgroup")
def test_run_shows_trusted_skills_to_a_program(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["skills", "new", "demo", "--in", ".agents/skills"]) == 0
    folder = Path(".agents/skills/demo")
    (folder / "hello.py").write_text("TEXT = 'hello'")
    program = "import os; print(os.listdir('/skills'))"
    assert main(["run", "--skills", "-c", program]) == 0
    assert main(["skills", "trust", read_skill(folder).reference]) == 0
    assert (
        main(
            [
                "run",
                "--skills",
                ".agents/skills",
                "-c",
                "import skills.demo.hello as h; print(h.TEXT)",
            ]
        )
        == 0
    )
    assert capfd.readouterr().out.splitlines()[1::2] == ["[]", "hello"]
    assert main(["run", "--skills", "--connect", "x", "-c", "1"]) == 2


def test_a_new_skill_is_where_list_looks(capsys: Capture) -> None:
    assert said(capsys, "new", "demo") == ".agents/skills/demo\n"
    assert json.loads(said(capsys, "list", "--json"))[0]["name"] == "demo"

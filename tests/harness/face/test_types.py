"""Type checkers in a user's project see the package as it is installed, by its `py.typed`."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROGRAMS = Path(__file__).parent / "programs"
WRONG = PROGRAMS / "mistakes.py"
RIGHT = sorted({*PROGRAMS.glob("*.py")} - {WRONG})


def mistakes() -> set[int]:
    """Return the numbers of the lines that a comment calls wrong."""
    lines = enumerate(WRONG.read_text().splitlines(), 1)
    return {number for number, line in lines if re.search(r"# an? (wrong|unknown) ", line)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project: its virtual environment has the package, and what that depends on."""
    project = tmp_path_factory.mktemp("project")
    venv.create(project / ".venv", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(project / ".venv")}))
    (packages / "cellwright").symlink_to(ROOT / "cellwright")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return project


def run(project: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=project, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(project: Path, *programs: Path) -> set[tuple[str, int]]:
    """Return file and line of each error that mypy --strict finds."""
    out = run(
        project, "mypy", "--strict", "--config-file=", "--python-executable=.venv/bin/python",
        *map(str, programs),
    )  # fmt: skip
    assert re.search(r"^(Found|Success)", out, re.MULTILINE), out
    found = re.findall(r"^(\S+\.py):(\d+): error", out, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in found}


def pyright(project: Path, *programs: Path) -> set[tuple[str, int]]:
    """Return file and line of each error that pyright finds."""
    out = run(
        project, "pyright", "--outputjson", "--pythonpath=.venv/bin/python", *map(str, programs)
    )  # fmt: skip
    said = json.loads(out[out.index("{") :])
    assert said["summary"]["filesAnalyzed"] == len(programs)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in said["generalDiagnostics"] if each["severity"] == "error"
    }  # fmt: skip


@pytest.mark.parametrize("check", [mypy, pytest.param(pyright, marks=pytest.mark.needs("pyright"))])
def test_a_type_checker_accepts_what_is_right_and_finds_each_mistake(
    project: Path, check: Callable[..., set[tuple[str, int]]]
) -> None:
    assert len(mistakes()) > 15
    assert check(project, *RIGHT, WRONG) == {(WRONG.name, line) for line in mistakes()}


@pytest.mark.parametrize("program", RIGHT, ids=lambda each: each.stem)
def test_the_programs_that_are_right_run(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout

"""Every program of harness/examples runs, prints what is expected, and is short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import text_of
from tests.model_server import serving

FOLDER = ROOT / "harness/examples"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
pytestmark = pytest.mark.needs("cgroup")

SHADOW = "FileNotFoundError: [Errno 2] No such file or directory: '/etc/shadow'"
# What each prints; a regular expression where that differs between runs and hosts.
PRINTED = {
    "first_program": re.escape(
        f"COMPLETED hello 6\nFAILED {SHADOW}\nrefused: openat '/etc/shadow' O_RDONLY mount_ns: not shown\n"
    ),
    "files_in_and_out": re.escape("new files: ['report.txt']\nnorth 270\nsouth 80\n"),
    "session": re.escape("2\nIndexError: list index out of range\n[1, 2, 3, 9]\n"),
    "approval": re.escape("COMPLETED paid 40 to bob\n"),
    "packages_offline": "hello, cell\n",
    "gpu_cells": r"no GPU here: devices\.gpu: .*\n|devices: nvidia0, .*\n.*TORCH\n",
    "network_by_name": r"example\.org: .*Name or service not known.*\nhello from the host\n",
    "agent_with_approvals": re.escape(
        "refund {'number': 17, 'amount': 25}: approve? approved\ncompleted paid 25 for order 17\n"
    ),
    "skill_folder": "not used before a person has trusted it\nXVII\n",
    "personal_data": r"the tool sends to ann@example\.org\nthe program sees pii_email_\.\.\.\n",
    "trail_and_page": r"intact: 6 records, head 6:\w{64}\n.+\na page of its own: True\n",
    "container": "process 2 of its cell, container kernel_shared\n",
    "evaluation": re.escape(
        "add      passed\nlargest  exception: AssertionError\nendless  cpu_time: used more than 1 s of CPU time\n"
        f"greedy   memory: needed more than 268435456 bytes\ncurious  exception: {SHADOW}\n1 of 5 passed\n"
    ),
    "tree_search": r"1000 nodes, 44 solutions, the first \(0, 4, 7, 5, 2, 6, 1, 3\)\n"
    r"\d+ branches by memory, \d+\.\d s\n",
}


def run(name: str, place: Path, answer: str = "yes\n", **env: str) -> str:
    """Run a program by its module in an empty directory; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"cellwright.harness.examples.{name}"], cwd=place, input=answer,
        env={"PATH": "/usr/bin:/bin", "HOME": str(place), "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_every_program_is_expected_to_print_something_and_is_in_the_index() -> None:
    assert sorted(PRINTED) == PROGRAMS
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", text_of("harness/examples/README.md"), re.M)
    assert sorted(listed) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 60


def with_needs(name: str) -> object:
    marks = [pytest.mark.needs("runc")] if name == "container" else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [*map(with_needs, PROGRAMS)])
def test_a_program_prints_what_is_expected_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    assert re.fullmatch(PRINTED[name], run(name, tmp_path))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_a_call_that_the_person_refuses_is_not_made(tmp_path: Path) -> None:
    assert run("approval", tmp_path, "no\n") == "FAILED tools.ToolError: pay was not approved\n"
    said = run("agent_with_approvals", tmp_path, "no\n")
    assert said.endswith("refused\ncompleted The refund was refused.\n")


def test_the_agent_talks_to_the_server_of_a_model(tmp_path: Path) -> None:
    from cellwright.harness.examples.agent_with_approvals import SCRIPT, TASK

    with serving(SCRIPT) as server:
        said = run("agent_with_approvals", tmp_path, MODEL_URL=server.url)
    assert said.endswith("completed paid 25 for order 17\n")
    assert len(server.requests) == 2
    assert TASK in str(server.requests[0]["messages"])


def test_a_program_runs_by_its_path_as_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "session.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert re.fullmatch(PRINTED["session"], done.stdout), done.stderr

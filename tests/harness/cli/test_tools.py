"""`cellwright tools`, as a shell sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OPTIONAL, ROOT

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]
DOUBLE = 'def double(n: int) -> int:\n    """Double a number."""\n    return n * 2\n'


class Shell:
    """Runs commands on one registry, in one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "double.py").write_text(DOUBLE)
        (place / "test.py").write_text("assert double(2) == 4\n")

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cellwright", "tools", *arguments, *OPTIONS]
        environment = os.environ | {
            "XDG_DATA_HOME": str(self.place / "data"),
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(command, cwd=self.place, input=stdin, capture_output=True, text=True,
                              timeout=60, check=False, env=environment)  # fmt: skip

    def says(self, *arguments: str, stdin: str = "") -> str:
        done = self(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def tools(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_tool_is_made_called_shown_and_removed(tools: Shell) -> None:
    assert tools.says("create", "double.py", "--test", "test.py") == "double@1 tested\n"
    assert tools.says("call", "double", '{"n": 21}') == "42\n"
    assert tools.says("call", "double", "-", stdin='{"n": 4}') == "8\n"
    assert tools.says("test", "double") == "1 tests passed\n"
    assert tools.says("list").split() == ["double@1", "tested", "Double", "a", "number."]
    assert json.loads(tools.says("list", "--json"))[0]["uses"] == 2
    assert tools.says("show", "double", "--source").strip() == DOUBLE.strip()
    assert json.loads(tools.says("show", "double"))["usage"] == {
        "uses": 2,
        "failures": 0,
        "in_a_row": 0,
    }
    assert tools.says("trust", "double") == "double@1 trusted\n"
    assert tools.says("remove", "double") == ""
    assert tools("list").stderr == "cellwright: no tools\n"
    assert (tools.place / "data/cellwright").stat().st_mode & 0o777 == 0o700


def test_a_tool_goes_from_one_registry_to_another_as_files(tools: Shell) -> None:
    tools.says("create", "double.py", "--calls", "double", "--risky")
    assert tools.says("export", "double", "out") == "out/double\n"
    other = ("--registry", "other.db")
    assert tools("import", "out/double", *other).returncode == 2
    assert tools.says("import", "out/double", "--grant", *other) == "double@1 draft\n"
    refused = tools("call", "double", '{"n": 1}', *other)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "double must be approved" in refused.stderr


def test_a_retired_tool_is_listed_when_asked_for(tools: Shell) -> None:
    tools.says("create", "double.py")
    tools.says("retire", "double")
    assert tools("list").stderr == "cellwright: no tools\n"
    assert "retired" in tools.says("list", "--retired")
    assert tools.says("test", "double", '{"n": 1}') == "2\n"
    assert tools("call", "double", '{"n": 1}').returncode == 2


def test_source_from_standard_input_needs_a_name(tools: Shell) -> None:
    assert tools("create", "-", stdin=DOUBLE).returncode == 2
    assert tools.says("create", "-", "--name", "double", stdin=DOUBLE) == "double@1 draft\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("call", "nothing"), 2, "there is no tool nothing"),
        (("call", "double", "[]"), 2, "must be a JSON object"),
        (("call", "double", "{"), 2, "not JSON"),
        (("call", "double", '{"n": "x"}'), 2, "not of type"),
        (("call", "failing"), 1, "ValueError: \\x1b[2J"),
        (("call", "../double"), 2, "not a valid tool name"),
        (("create", "missing.py"), 2, "cannot read missing.py"),
        (("create", "bad.py"), 2, "Blocked import: os"),
        (("create", "double.py", "--schema", "test.py"), 2, "not JSON"),
        (("create", "double.py", "--read", "/usr/share/*", "--policy", "strict"), 2, "more than the sandbox"),
        (("list", "--registry", "test.py"), 70, "not a database"),
        (("list", "--registry", "missing/tools.db"), 2, "cannot open"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_message_and_a_status(
    tools: Shell, arguments: tuple[str, ...], status: int, said: str
) -> None:
    (tools.place / "bad.py").write_text("import os\ndef bad(): ...")
    (tools.place / "failing.py").write_text("def failing(): raise ValueError('\\x1b[2J')")
    for name in ("double", "failing"):
        tools.says("create", f"{name}.py")
    done = tools(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_running_a_program_does_not_pay_for_tools() -> None:
    code = (
        "import sys; import cellwright.harness.cli.commands, cellwright.harness.sandbox.sandbox; "
        "print([name for name in ('jsonschema', 'sqlite3', 'cellwright.harness.making.factory') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

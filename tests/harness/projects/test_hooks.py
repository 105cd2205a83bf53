"""`cellwright exec --print-hook`: hooks with which agents run each shell command in a cell, or not at all."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.projects.agents.hooks import agent_hooks, hook_of
from tests.harness.projects.test_exec import home, project, ran

__all__ = ["home", "project"]
pytestmark = pytest.mark.needs("userns")
LINE = "echo 'in' > made; x=(a b); echo \"${x[1]}\"; hostname; exit 3"


@pytest.fixture
def cellwright(tmp_path: Path) -> Path:
    """The command, as a package manager would install it."""
    command = tmp_path / "bin/cellwright"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cellwright "$@"\n')
    command.chmod(0o755)
    return command


def installed(agent: str, cellwright: Path, place: Path) -> dict[str, Path]:
    """Write an agent's files, by their names."""
    files = {}
    for file in hook_of(agent, str(cellwright)).files:
        path = place / Path(file.path).name
        path.write_text(file.text.lstrip())
        path.chmod(0o755)
        files[path.name] = path
    return files


def asked(hook: Path, tool_input: Any, *options: str) -> subprocess.CompletedProcess[bytes]:
    data = json.dumps({"tool_name": "Bash", "tool_input": tool_input}).encode()
    command = (sys.executable, "-I", str(hook), *options)
    return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def ran_in_a_cell(line: str | list[str], project: Path) -> None:
    command = line if isinstance(line, list) else ["bash", "-c", line]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, cwd=project)
    assert (done.stdout, done.returncode) == (b"b\ncell\n", 3), done
    assert (project / "made").read_text() == "in\n"


def test_a_hook_changes_the_command_and_nothing_else(cellwright: Path, project: Path) -> None:
    hook = installed("claude", cellwright, cellwright.parent)["cellwright_hook.py"]
    given = {"command": LINE, "description": "step", "timeout": 1000, "run_in_background": True}
    (answer,) = json.loads(asked(hook, given).stdout).values()
    changed = answer.pop("updatedInput")
    assert answer == {"hookEventName": "PreToolUse"}
    assert changed == {**given, "command": shlex.join([str(cellwright), "exec", "--shell", LINE])}
    ran_in_a_cell(changed["command"], project)
    (answer,) = json.loads(asked(hook, given, "--allow").stdout).values()
    assert answer["permissionDecision"] == "allow"


@pytest.mark.parametrize("tool_input", [None, {}, {"command": 3}, []])
def test_a_hook_that_does_not_understand_a_call_blocks_it(
    cellwright: Path, tmp_path: Path, tool_input: Any
) -> None:
    hook = installed("codex", cellwright, tmp_path)["cellwright_hook.py"]
    done = asked(hook, tool_input)
    assert (done.stdout, done.returncode) == (b"", 2)
    assert b"the command was not run" in done.stderr


def test_a_hook_blocks_if_cellwright_or_the_hook_itself_is_missing_or_broken(
    cellwright: Path, home: Path
) -> None:
    hook = installed("claude", cellwright, home)["cellwright_hook.py"]
    for agent in ("claude", "codex"):
        (line,) = [
            line.partition("python3")[2].strip('"} ')
            for file in hook_of(agent, str(cellwright)).files
            for line in file.text.splitlines()
            if "command" in line and "python3" in line
        ]
        line = f"python3{line}"
        place = home / line.split("~/")[1].split()[0]
        place.parent.mkdir(parents=True, exist_ok=True)
        assert subprocess.run(line, shell=True, capture_output=True, check=False).returncode == 2
        place.write_text("this is { no program")
        assert subprocess.run(line, shell=True, capture_output=True, check=False).returncode == 2
    cellwright.unlink()
    done = asked(hook, {"command": "touch made"})
    assert (done.stdout, done.returncode) == (b"", 2)
    assert str(cellwright).encode() in done.stderr


def test_the_shell_of_pi_runs_lines_in_a_cell_and_nothing_else(
    cellwright: Path, project: Path, tmp_path: Path
) -> None:
    files = installed("pi", cellwright, tmp_path)
    assert json.loads(files["settings.json"].read_text())["shellPath"].endswith(
        "/.pi/agent/cellwright-shell"
    )
    ran_in_a_cell([str(files["cellwright-shell"]), "-c", LINE], project)
    for arguments in (["-c"], ["-c", "ls", "x"], [LINE], ["-l", LINE]):
        done = subprocess.run([str(files["cellwright-shell"]), *arguments], check=False)
        assert done.returncode == 2


@pytest.mark.needs("node")
def test_the_plugin_of_opencode_runs_lines_in_a_cell(
    cellwright: Path, project: Path, tmp_path: Path
) -> None:
    files = installed("opencode", cellwright, tmp_path)
    plugin = files["cellwright.js"].rename(tmp_path / "cellwright.mjs")
    code = f"""
        import {{ Cellwright }} from {json.dumps(str(plugin))}
        const call = {{ args: {{ command: {json.dumps(LINE)}, timeout: 1000 }} }}
        const hook = (await Cellwright())["tool.execute.before"]
        await hook({{ tool: "read" }}, {{ args: {{}} }})
        await hook({{ tool: "bash" }}, call)
        console.log(JSON.stringify(call.args))
    """
    command = ("node", "--input-type=module", "-e", code)
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    changed = json.loads(done.stdout)
    assert changed["timeout"] == 1000
    ran_in_a_cell(changed["command"], project)
    allowed = json.loads(files["opencode.json"].read_text())["permission"]["bash"]
    assert allowed == {"*": "deny", f"{cellwright} exec --shell *": "allow"}


def test_the_command_prints_the_files_and_where_they_belong(home: Path) -> None:
    for agent in agent_hooks():
        printed = ran("--print-hook", agent)
        assert printed.returncode == 0
        for file in hook_of(agent).files:
            assert f" {file.path}:\n{file.text.strip()}" in printed.stdout.decode()
            assert "{cellwright}" not in file.text
    assert b"must be of claude, codex, opencode, pi" in ran("--print-hook", "other").stderr
    with pytest.raises(PolicyError, match="plain characters"):
        hook_of("pi", "/opt/a b/cellwright")

"""Examples written for other packages run here with only the import changed."""

import re
from pathlib import Path
from typing import Any

import pytest

from cellwright import PermissionSet, PolicyError, Sandbox, SandboxStatus
from tests.conftest import SHARED

IMPORTS = re.compile(r"from (openagentflow\.meta|agent_sandbox(?:\.\w+)?) import")

# The examples close none of the sandboxes that they make, and one names paths that it may not read.
pytestmark = [
    pytest.mark.filterwarnings("ignore:a sandbox under the policy .* was never closed"),
    pytest.mark.filterwarnings("ignore:allowed_paths. no path is shown"),
]


def examples(name: str) -> list[str]:
    text = (SHARED / "seeds" / name).read_text()
    return [
        IMPORTS.sub("from cellwright import", code)
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run an example after those before it; one of them closes the sandbox that others go on using."""
    names["sandbox"] = Sandbox()
    try:
        exec(compile(code, "example", "exec"), names)
    finally:
        for each in names.values():
            if isinstance(each, Sandbox):
                each.close()
    return names


@pytest.mark.filterwarnings("ignore:Sandbox.blocked_:DeprecationWarning")  # old keywords still work
@pytest.mark.needs("shared", "cgroup")
def test_the_meta_agents_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    checks, making, lists = examples("jit-meta-agent.md")
    names = run(checks, {})
    assert (names["safe"], names["reason"]) == (False, "Blocked import: os")
    run(making, names)
    assert names["result"] == 42
    assert capsys.readouterr().out == "double: Double a number\n"
    names["factory"].close()
    run(lists, names)
    spec = names["spec"]
    assert (spec.name, spec.description) == ("double", "Double a number")
    assert spec.source_code == "def double(n: int) -> int:\n    return n * 2"
    assert spec.parameters["required"] == ["n"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", spec.created_at)


@pytest.mark.needs("shared", "cgroup")
def test_the_agent_sandboxs_examples_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them asks for a directory that is not here: that is refused, and the rest of it runs
    without."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"SandboxStatus": SandboxStatus}  # programs use it without importing it
    for code in examples("agent-sandbox.md"):
        if "CodeExecutor(" in code:
            with pytest.raises(PolicyError, match="matches nothing on this host"):
                run(code, names)
            names["permissions"] = PermissionSet()
        run(code, names)
    out = capsys.readouterr().out
    for line in (
        "Hello from sandbox!",
        "SandboxStatus.COMPLETED",
        "False",
        "managed",
        "Error: ValueError: oops",
    ):
        assert line in out
    assert (tmp_path / "audit.jsonl").is_file()
    result = names["executor"].execute("import sys; print(1); print(2, file=sys.stderr)")
    shell = names["ExecutionContext"](language="shell")
    assert names["executor"].execute("echo hi", shell).stdout == "hi\n"
    assert (result.status, result.stdout, result.stderr) == (SandboxStatus.COMPLETED, "1\n", "2\n")


@pytest.mark.needs("shared")
def test_all_examples_are_looked_at() -> None:
    assert [len(examples(name)) for name in ("jit-meta-agent.md", "agent-sandbox.md")] == [3, 10]

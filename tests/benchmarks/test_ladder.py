"""The ladder takes the steps that a cell takes."""

import ast
from pathlib import Path

import pytest

from cellwright.benchmarks import ladder
from cellwright.benchmarks.settings import Settings
from cellwright.policies.policy import Policy
from tests.conftest import OPTIONAL, ROOT


def calls_in(path: Path, functions: set[str]) -> list[str]:
    """Return what some functions of a module call, in the order of the text, without `enter.`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            calls.sort(key=lambda call: (call.lineno, call.col_offset))
            found += [ast.unparse(call.func).removeprefix("enter.") for call in calls]
    return found


def test_the_rungs_are_the_steps_of_a_cell_in_their_order() -> None:
    steps = calls_in(ROOT / "runner/cell/enter.py", {"enter"})
    rungs = calls_in(ROOT / "benchmarks/rungs.py", {"_steps"})
    assert "_filter_system_calls" in steps
    assert set(steps) - set(rungs) == {"tell", "Mounted"}  # what the supervisor is told
    # `unshare` and the limits stand in the table below the functions
    moved = {
        "processes.unshare",
        "_limit_resources",
        "_filter_system_calls",
        "tell",
        "Mounted",
        "os.close",
    }
    in_order = [name for name in steps if name not in moved]
    assert [name for name in rungs if name in in_order] == in_order


@pytest.mark.needs("userns")
def test_a_ladder_stands_on_this_host_and_what_is_missing_is_said() -> None:
    policy = Policy(name="strict", optional_layers=OPTIONAL)
    report = ladder.measure(Settings(policy, smoke=True))
    rows = {str(row[0]): row for row in report.tables[0].rows}
    assert {"bare fork", "+ seccomp", "+ own mounts"} <= rows.keys()
    absent = [name for name in rows if ": absent, " in name]
    assert ("+ cgroup" in rows) == (not any(name.startswith("cgroup:") for name in absent))
    climbed = next(verdict for verdict in report.verdicts if verdict.what.startswith("every rung"))
    assert climbed.holds, climbed.seen

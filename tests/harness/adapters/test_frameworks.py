"""The test suites of agent frameworks for sandboxes, and our own of the adapters, in `.frameworks`.

Each runs once, in a pytest of that environment; every test of it is one here.  `outcomes.json` names
them, with the outcome that is expected.
"""

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.needs("cgroup", "frameworks"), pytest.mark.slow]
_FOLDER = ROOT / "tests" / "frameworks"
_ENVIRONMENT = ROOT / ".frameworks"
_EVALUATION = (
    "harbor",
    "harbor_images",
    "swe_rex",
    "verifiers",
)  # suites in an environment of their own
EXPECTED: dict[str, dict[str, str]] = json.loads((_FOLDER / "outcomes.json").read_text())
_SUITES_OF_OTHERS = {"deepagents": 86, "pydantic_ai": 40, "inspect_ai": 44}
# With deepagents 0.7 these fail: it overwrites files, and returns absolute paths.  So they run with 0.6.
_OLDER = "deepagents-0.6"


@functools.cache
def outcomes(suite: str) -> dict[str, str]:
    """Run a suite, and return the outcome of each test with the reason, if it has one."""
    name, _, version = suite.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        env = {"PATH": os.environ["PATH"], "HOME": folder}
        chosen = [str(_FOLDER / f"suite_{name}.py")]
        if version:
            env["PYTHONPATH"] = str(_ENVIRONMENT / suite)
            chosen = [f"{chosen[0]}::{each}" for each in EXPECTED[suite]]
        environment = _ENVIRONMENT / "evaluation" if name in _EVALUATION else _ENVIRONMENT
        done = subprocess.run(
            [environment / "bin" / "python", "-m", "pytest", "-c", _FOLDER / "pytest.ini",
             "--rootdir", _FOLDER, "--confcutdir", _FOLDER, f"--junitxml={results}", *chosen],
            cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert results.exists(), done.stdout + done.stderr
        return {_name(case): _outcome(case) for case in ElementTree.parse(results).iter("testcase")}


def _name(case: ElementTree.Element) -> str:
    *_, place = (case.get("classname") or "").split(".")
    return f"{place}::{case.get('name')}"


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"failed: {child.text}"
        if child.tag == "skipped":
            return f"skipped: {child.get('message')}"
    return "passed"


def _in_its_environment(suite: str, *more: str) -> object:
    marks = pytest.mark.needs("evaluation") if suite in _EVALUATION else ()
    if suite == "harbor_images":
        marks = pytest.mark.needs("evaluation", "root", "busybox", "image")
    return pytest.param(suite, *more, marks=marks)


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        _in_its_environment(suite, name)
        for suite, expected in EXPECTED.items() for name in expected
    ],
)  # fmt: skip
def test_a_test_of_a_suite_has_the_expected_outcome(suite: str, name: str) -> None:
    found = outcomes(suite).get(name, "not run")
    assert found.startswith(EXPECTED[suite][name]), found


@pytest.mark.parametrize("suite", [*map(_in_its_environment, EXPECTED)])
def test_no_test_of_a_suite_is_left_out(suite: str) -> None:
    assert sorted(outcomes(suite)) == sorted(EXPECTED[suite])


@pytest.mark.parametrize(("suite", "count"), _SUITES_OF_OTHERS.items())
def test_every_test_of_others_passes_but_those_with_a_reason(suite: str, count: int) -> None:
    """What the pages say."""
    expected = EXPECTED[suite]
    assert len(expected) == count
    contradicted = [name for name, outcome in expected.items() if outcome == "failed"]
    assert sorted(contradicted) == (sorted(EXPECTED[_OLDER]) if suite == "deepagents" else [])
    assert set(EXPECTED[_OLDER].values()) == {"passed"}
    skipped = [name for name, outcome in expected.items() if outcome.startswith("skipped")]
    assert len(skipped) == (suite == "inspect_ai")

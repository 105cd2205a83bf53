"""The tables of hosts in both READMEs are what was found on them, and nothing that was found is bad."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellwright.policies.languages import LANGUAGES
from cellwright.policies.layers import ALWAYS
from cellwright.policies.policy import OPTIONAL_LAYERS
from tests.conftest import CAPS
from tests.hosts import results

RESULTS = {result["host"]: result for result in results.read_all()}
CAPPED = {"cgroup_sockets", "freezer"}  # of which a policy says nothing: they come with cgroups
ALL = {*ALWAYS, *OPTIONAL_LAYERS, *CAPPED}
ATTACKED = {"a", "b", "e"}
# what each host has to hold; where it is nothing, nothing may run
HOLDS = {"a": ALL, "b": ALL, "c": ALL - CAPPED - set(CAPS), "d": set(), "e": ALL, "f": ALL}


def holding(result: dict[str, Any]) -> set[str]:
    passed = {each["layer"] for each in result["findings"] if each["verdict"] == "PASS"}
    return passed - set(results.NOT_LAYERS)


@pytest.mark.parametrize("folder", results.TABLES, ids=str)
def test_the_table_in_a_readme_is_what_was_found(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    assert results.written(readme, results.TABLES[folder](results.read_all())) == readme


def test_what_doctor_tries_besides_layers_is_not_taken_for_one() -> None:
    assert {*LANGUAGES, "launcher", "daemon"} <= set(results.NOT_LAYERS)


def test_every_host_was_surveyed() -> None:
    assert set(RESULTS) == set(HOLDS)


@pytest.mark.parametrize("name", HOLDS)
def test_a_host_holds_what_it_can_and_no_test_failed(name: str) -> None:
    result = RESULTS[name]
    assert holding(result) == HOLDS[name]
    assert result["tests"]["failed"] == 0
    assert result["tests"]["passed"] > 200  # on an emulated aarch64, of branches, steps and posture


@pytest.mark.parametrize("name", sorted(ATTACKED))
def test_no_payload_escaped_on_a_host(name: str) -> None:
    said = RESULTS[name]["attacks"]
    assert said["escaped"] == []
    assert said["contained"] + len(said["ended"]) > 90


def test_a_layer_that_is_missing_or_never_tried_shows_as_that() -> None:
    found = {
        "host": "x", "title": "t", "kernel": "6", "machine": "m", "date": "d",
        "tests": {"passed": 1, "failed": 0, "skipped": 0},
        "findings": [
            {"layer": "seccomp", "verdict": "PASS", "proof": "tried", "repair": ""},
            {"layer": "landlock", "verdict": "WARN", "proof": "none", "repair": ""},
        ],
    }  # fmt: skip
    refusing = found | {
        "host": "y",
        "findings": [{"layer": "launcher", "verdict": "FAIL", "proof": "why", "repair": "do"}],
    }
    lines = results.table([found, refusing]).splitlines()
    assert "| `seccomp` | tried | holds | refuses |" in lines
    assert "- `y`: why. Repair: do" in lines


def test_a_result_is_the_last_survey_in_the_output(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.keep(
        "x", "title", 'noise\nsurvey: {"kernel": "1"}\r\nsurvey: {"kernel": "2"}\n[ 9.1] down'
    )
    kept = {"host": "x", "title": "title", "kernel": "2", "attacks": {}}
    assert json.loads((tmp_path / "x.json").read_text()) == kept
    results.keep("x", "title", 'attacks: {"escaped": []}\n')
    assert json.loads((tmp_path / "x.json").read_text()) == kept | {"attacks": {"escaped": []}}
    with pytest.raises(SystemExit, match="said nothing"):
        results.keep("y", "title", "nothing")

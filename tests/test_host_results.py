"""The tables of hosts in both READMEs are what was found on them, and nothing that was found is bad."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellwright.policies.compiling.host import ALWAYS
from cellwright.policies.languages import LANGUAGES
from cellwright.policies.policy import OPTIONAL_LAYERS
from tests.conftest import CAPS
from tests.hosts import results

RESULTS = {result["host"]: result for result in results.read_all()}
CAPPED = {"cgroup_sockets", "freezer"}  # not in a policy: they come with cgroups
ALL = {*ALWAYS, *OPTIONAL_LAYERS, *CAPPED}
ATTACKED = {"a", "b", "e", "f"}
# layers that each host must hold; on a host without any nothing may run
HOLDS = {"a": ALL, "b": ALL, "c": ALL - CAPPED - set(CAPS), "d": set(), "e": ALL, "f": ALL}


def holding(result: dict[str, Any]) -> set[str]:
    passed = {each["layer"] for each in result["findings"] if each["verdict"] == "PASS"}
    return passed - set(results.NOT_LAYERS)


@pytest.mark.parametrize("document", results.TABLES, ids=str)
def test_the_table_in_a_document_is_what_was_found(document: Path) -> None:
    text = document.read_text()
    assert results.written(text, results.TABLES[document](results.read_all())) == text


def test_a_daemon_on_a_small_host_takes_less_than_40_mib_and_starts_within_a_second() -> None:
    found = json.loads((results.FOLDER / "g.json").read_text())["edge"]
    assert found["memory_mib"] < 512
    assert found["idle"]["pss"] < 40 * 1024
    assert found["after_calls"]["pss"] < 40 * 1024
    assert found["start"] < 1


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
    assert result.get("features", {}).get("failed", 0) == 0


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

"""The ladder takes the steps that a cell takes."""

import re

import pytest

from cellwright.benchmarks import ladder
from cellwright.benchmarks.settings import Settings
from cellwright.benchmarks.stages import LAYERS
from cellwright.policies.policy import Policy
from tests.conftest import OPTIONAL, ROOT


def test_the_rungs_are_the_layers_of_the_list_in_their_order() -> None:
    text = (ROOT / "runner/cell/enter.py").read_text()
    confinement = text.partition("def confinement")[2].partition("\ndef ")[0]
    assert re.findall(r'do\.layer\("(.*?)"\)', confinement) == list(LAYERS)


@pytest.mark.needs("userns")
def test_a_ladder_stands_on_this_host_and_what_is_missing_is_said() -> None:
    policy = Policy(name="strict", optional_layers=OPTIONAL)
    report = ladder.measure(Settings(policy, smoke=True))
    rows = {str(row[0]): row for row in report.tables[0].rows}
    assert {"bare fork", "+ seccomp", "+ own mounts"} <= rows.keys()
    absent = [name for name in rows if ": absent, " in name]
    assert ("+ cgroup" in rows) == (not any(name.startswith("cgroup:") for name in absent))
    measured = next(
        verdict for verdict in report.verdicts if verdict.what.startswith("every stage")
    )
    assert measured.holds, measured.seen

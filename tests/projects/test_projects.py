"""The tables of agents and build systems are valid, and one entry of each runs."""

import subprocess
import sys

import pytest

from cellwright.harness.sandbox.projects.known_programs import known_programs
from tests.conftest import ROOT
from tests.projects.agents import agents
from tests.projects.build_systems import build_systems, untried
from tests.projects.scripted_model import Call


def test_every_agent_of_the_table_is_known() -> None:
    assert set(agents()) <= set(known_programs().agents)
    for agent in agents().values():
        steps = agent.steps(ROOT)
        assert steps[-1] == "The sum is mended."
        if not agent.replies:
            assert sum(isinstance(each, Call) for each in steps) >= 6


def test_every_build_system_has_files_and_packages() -> None:
    assert len(build_systems()) == 17
    for name, system in build_systems().items():
        assert system.files, name
        assert system.needs, name
        assert name not in untried()


@pytest.mark.needs("root", "cgroup", "make", "curl", "openssl")
def test_make_fetches_its_dependency_by_name_in_a_cell() -> None:
    command = [sys.executable, "-m", "tests.projects.build_systems", "make", "outside", "root"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.splitlines() == ["make outside: built", "make root: built"], done.stderr

"""`cellwright agent`: a person lists runs, and decides on the calls that they wait for."""

from pathlib import Path

import pytest

from cellwright.agent import Agent
from cellwright.harness.cli import main as cli
from cellwright.policies.errors import ModelUnavailable
from tests.conftest import policy_named
from tests.harness.agent.scripted import ScriptedModel, answer, program
from tests.harness.agent.test_agent import sender

Captured = pytest.CaptureFixture[str]


def told(captured: Captured, place: Path, *words: str) -> tuple[int, str, str]:
    status = cli.main(["agent", *words, "--directory", str(place)])
    return status, *captured.readouterr()


def waiting_run(place: Path, to: str) -> str:
    """Return a run that waits for the approval of a call."""
    script = [program(f"execute_tool('send', {{'to': {to}}})"), answer("1")]
    tools = [sender([], risky=True)]
    policy = policy_named("strict")
    with Agent(ScriptedModel(script), directory=place, tools=tools, policy=policy) as agent:
        return agent.run("t").run_id


def test_an_approved_call_is_printed_whole_before(tmp_path: Path, capsys: Captured) -> None:
    run = waiting_run(tmp_path, "'ann\\x1b[2J'")
    status, said, line = told(capsys, tmp_path, "approve", run)
    assert (status, said) == (0, "approved send, once\n")
    assert 'to: "ann\\u001b[2J"' in line
    assert told(capsys, tmp_path, "approve", run)[0] == 1


def test_a_call_that_cannot_be_shown_whole_is_shown_and_rejected_only(
    tmp_path: Path, capsys: Captured
) -> None:
    run = waiting_run(tmp_path, "str(list(range(20_000)))")
    status, _, line = told(capsys, tmp_path, "show", run)
    assert status == 0
    assert "can be rejected only" in line
    status, said, line = told(capsys, tmp_path, "approve", run)
    assert (status, said) == (70, "")
    assert "cannot be shown whole" in line
    assert told(capsys, tmp_path, "reject", run)[:2] == (0, "rejected send\n")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("sk-hush", "--key: must be env:NAME, file:/PATH or keyring:SERVICE/USER"),
        ("env:CELLWRIGHT_TEST_NO_KEY", "the environment has no CELLWRIGHT_TEST_NO_KEY"),
    ],
)
def test_a_key_is_named_by_its_source_and_never_shown(
    tmp_path: Path, capsys: Captured, key: str, why: str
) -> None:
    status, said, line = told(
        capsys, tmp_path, "run", "t", "--model", "http://127.0.0.1:1/v1", "--key", key
    )
    assert (status, said) == (2, "")
    assert why in line
    assert "sk-hush" not in line


def test_runs_are_listed_a_line_each(tmp_path: Path, capsys: Captured) -> None:
    assert "there are no runs in" in told(capsys, tmp_path, "runs")[2]
    model = ScriptedModel([ModelUnavailable("gone", "start it")])
    with (
        Agent(model, directory=tmp_path, policy=policy_named("strict")) as agent,
        pytest.raises(ModelUnavailable),
    ):
        agent.run("one\ntwo")
    status, said, _ = told(capsys, tmp_path, "runs")
    assert status == 0
    assert len(said.splitlines()) == 1

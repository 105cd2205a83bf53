"""The shell of LangChain's middleware in a cell: state, files, time, policies."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from langchain.agents.middleware.shell_tool import SHELL_TEMP_PREFIX, ShellSession

from cellwright.harness.adapters.langchain import CellExecutionPolicy


@contextmanager
def shell(workspace: Path | None = None, **given: object) -> Iterator[ShellSession]:
    with tempfile.TemporaryDirectory(prefix=SHELL_TEMP_PREFIX) as made:
        policy = CellExecutionPolicy(**given)
        place = workspace or Path(made)
        session = ShellSession(place, policy, ("/bin/bash",), {"PATH": "/usr/bin", "A": "1 2"})
        session.start()
        try:
            yield session
        finally:
            session.stop(20)


def test_the_shell_keeps_its_state_and_reports_exit_codes() -> None:
    with shell() as session:
        done = session.execute("x=$A; cd /tmp; echo out; echo err >&2; false", timeout=30)
        assert (done.output, done.exit_code) == ("out\nerr\n", 1)
        assert session.execute("echo $x in $PWD", timeout=30).output == "1 2 in /tmp\n"


def test_it_sees_nothing_of_the_host() -> None:
    with shell() as session:
        assert "No such file" in session.execute("cat /etc/shadow", timeout=30).output
        assert session.execute("ls -A", timeout=30).output == ""


def test_a_command_that_takes_too_long_restarts_the_shell() -> None:
    with shell() as session:
        assert session.execute("x=1", timeout=30).exit_code == 0
        assert session.execute("sleep 600", timeout=1).timed_out
        assert session.execute("echo ${x:-new}", timeout=30).output == "new\n"


def test_a_workspace_that_was_given_is_shown_and_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("given\n")
    tmp_path.chmod(0o777)
    with shell(tmp_path) as session:
        assert (
            session.execute("cat in; echo made > out; pwd", timeout=30).output
            == f"given\n{tmp_path}\n"
        )
    assert (tmp_path / "out").read_text() == "made\n"


def test_an_invalid_policy_is_told(tmp_path: Path) -> None:
    policy = CellExecutionPolicy(policy="no-such-profile")
    process = policy.spawn(workspace=tmp_path, env={}, command=("/bin/bash",))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 70
    assert "no-such-profile" in errors


@pytest.mark.parametrize("policy", ["workshop", {"extends": "standard"}])
def test_profiles_and_mappings_are_policies(policy: object) -> None:
    with shell(policy=policy) as session:
        assert session.execute("id -un", timeout=30).output == "cell\n"

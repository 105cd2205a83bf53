"""Results and errors print themselves shortly, and each hint once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright import LaunchError, PolicyError, Sandbox
from tests.conftest import policy_named


@pytest.mark.parametrize(
    "code",
    [
        "'x' * 100_000",
        "list(range(10_000))",
        "print('x' * 90_000); open('/etc/shadow')",
        "import sys; sys.exit(3)",
    ],
)
def test_the_repr_of_a_result_is_a_line_or_two(code: str) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        result = sandbox.execute(code)
    assert "\n" not in repr(result)
    assert len(repr(result)) < 320
    assert repr(result).startswith(f"SandboxResult(status={result.status.name}, reason=")
    assert f"{result.execution_time * 1000:.1f} ms" in repr(result)


def test_the_repr_of_a_result_has_what_a_small_one_says() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        shown = repr(sandbox.execute("print('hello')\n6 * 7"))
    assert "value=42, stdout='hello\\n', " in shown


def test_an_error_that_quotes_another_has_one_hint() -> None:
    inner = PolicyError("the inner failure", "do this")
    outer = LaunchError(f"cannot go on: {inner}")
    assert str(outer) == "cannot go on: the inner failure\nhint: do this"
    assert (outer.what, outer.hint) == ("cannot go on: the inner failure", "do this")
    other = LaunchError(f"cannot go on: {inner}", "do that")
    assert str(other) == "cannot go on: the inner failure\nhint: do that"


def test_the_error_of_a_policy_file_has_one_hint(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("[limits]\nwall_second = 3\n")
    with pytest.raises(PolicyError) as raised:
        Sandbox(policy=tmp_path / "p.toml")
    assert str(raised.value).count("hint: ") == 1
    assert raised.value.hint == "did you mean wall_seconds?"


@pytest.mark.needs("root")
def test_a_daemon_of_another_user_is_told_from_one_that_does_not_answer(tmp_path: Path) -> None:
    """An ordinary user meets a socket of root's, mode 0600."""
    script = """
import os, socket, sys
from cellwright.policies.errors import LaunchError
from cellwright.harness.sandbox.remote.connections import _connected
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("socket")
os.chmod("socket", 0o600)
listener.listen()
os.setuid(54322)
try:
    _connected("socket")
except LaunchError as error:
    print(error)
"""
    os.chmod(tmp_path, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == (
        'the daemon at socket belongs to another user\nhint: start one of your own: "cellwright serve"\n'
    )

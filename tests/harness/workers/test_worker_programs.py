"""Long-lived programs, judges and the network of a sandbox with workers."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from cellwright import Sandbox
from cellwright.policies.errors import LauncherLost
from tests.conftest import policy_named, soon
from tests.harness.workers.test_workers import pids_of

PYTHON = os.path.realpath(sys.executable)
ECHO = "import sys\nfor line in sys.stdin: print(len(line.strip()), flush=True)\n"


@pytest.fixture(scope="module")
def two() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("server"), pool=1, workers=2) as sandbox:
        yield sandbox


def test_a_program_has_its_streams_in_this_process(two: Sandbox) -> None:
    with two.program([PYTHON, "-I", "echo.py"], files={"echo.py": ECHO}) as program:
        for line, length in ((b"hello\n", b"5\n"), (b"cell\n", b"4\n")):
            os.write(program.stdin, line)
            assert os.read(program.stdout, 100) == length
        program.close_stdin()
        result = program.wait(60)
    assert (result.reason, result.exit_code) == ("exit", 0)


def test_a_signal_and_the_standard_error_reach_the_caller(two: Sandbox) -> None:
    code = "import sys, time\nprint('up', file=sys.stderr); print(flush=True)\ntime.sleep(600)"
    with two.program([PYTHON, "-I", "-c", code]) as program:
        os.read(program.stdout, 1)
        assert program.is_alive()
        assert program.stderr == "up\n"
        program.send_signal(signal.SIGTERM)
        assert program.wait(60).signal == signal.SIGTERM
        assert program.stderr == "up\n"


def test_a_program_of_a_killed_worker_is_lost() -> None:
    with (
        Sandbox(policy=policy_named("server"), pool=1, workers=2) as sandbox,
        sandbox.program([PYTHON, "-I", "echo.py"], files={"echo.py": ECHO}) as program,
    ):
        killed = pids_of(sandbox)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(LauncherLost):
            program.wait(60)
        assert soon(lambda: not {*killed} & {*pids_of(sandbox)})
        assert sandbox.execute("1").value == 1

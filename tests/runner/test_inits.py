"""Inits, the nursery that makes them, and the launcher that takes them: on a bad day."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cellwright import LaunchError, Sandbox
from cellwright.runner import channel
from cellwright.testing import inspect
from tests.conftest import policy_named, soon


def test_inits_that_were_killed_while_they_waited_are_passed_over() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert sandbox.execute("1 + 1").value == 2
        inspected = inspect(sandbox)
        assert soon(lambda: len(inspected.init_pids()) == 2)
        # One may be that of the first cell, which has ended or is about to.
        killed = [_killed(pid) for pid in inspected.init_pids()]
        assert any(killed)
        assert [sandbox.execute("1 + 1").value for _ in range(4)] == [2] * 4


def _killed(pid: int) -> bool:
    """Kill a process and wait for its end; tell whether it was still there."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    else:
        return channel.has_news(pidfd, 60)
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["keeper", "nursery", "launcher"])
def test_the_pids_of_a_launcher_that_died_are_an_error_of_ours(which: int) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation.launcher
        pids = launcher.pids()
        pidfds = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[which], signal.SIGKILL)
        for pidfd in pidfds:
            assert channel.has_news(pidfd, 60)
            os.close(pidfd)
        with pytest.raises(LaunchError):
            launcher.pids()
        assert sandbox.execute("1 + 1").value == 2


@pytest.mark.parametrize("which", [0, 1, 2], ids=["keeper", "nursery", "launcher"])
def test_closing_does_not_wait_for_a_process_that_is_stopped(which: int) -> None:
    sandbox = Sandbox(policy=policy_named("strict"), pool=0)
    pid = inspect(sandbox).supervisor.generation.launcher.pids()[which]
    os.kill(pid, signal.SIGSTOP)
    closing = threading.Thread(target=sandbox.close)
    closing.start()
    closing.join(10)
    hangs = closing.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    closing.join()
    assert not hangs


MANY = """
import os, resource, sys
sys.path[:0] = {paths!r}
from cellwright import Sandbox
from tests.conftest import policy_named
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
for pool in (0, 1):
    with Sandbox(policy=policy_named("strict"), pool=pool) as sandbox:
        sandbox.settle()
        print(sandbox.execute("1 + 1").value)
"""


def test_the_embedding_process_may_have_more_descriptors_than_select_can_hold() -> None:
    script = MANY.format(paths=[str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "2\n2\n", done.stderr[-2000:]


def test_news_is_what_can_be_read_or_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not channel.has_news(ours.fileno())
        theirs.send(b"x")
        assert channel.has_news(ours.fileno())
        ours.recv(1)
        theirs.close()
        assert channel.has_news(ours.fileno(), 5)

"""Stopping processes by their pidfds."""

import os
import signal
from collections.abc import Iterator

import pytest

from cellwright.runner.branching import traced
from cellwright.runner.branching.machine import machine
from cellwright.runner.branching.traced import Traced
from cellwright.runner.kernel import tracing


@pytest.fixture
def bystander() -> Iterator[int]:
    pid = _child()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _child() -> int:
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


def _gone() -> int:
    """Return the pidfd of a process that has ended."""
    pid = _child()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return pidfd


@pytest.mark.skipif(machine() is None, reason="this machine has no branches by memory")
def test_a_process_that_has_the_number_of_a_dead_target_goes_on(bystander: int) -> None:
    """A target can end, and its number be another process's, between two looks."""
    known, pidfd = machine(), _gone()
    assert known
    tracer = os.fork()
    if not tracer:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        traced.number_of = lambda _: bystander  # type: ignore[assignment]
        try:
            Traced(pidfd, known, is_source=False)
        except ProcessLookupError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(tracer, 0)[1] == 0
    os.close(pidfd)
    tracing.stop(bystander)  # which would find it dead
    tracing.let_go(bystander)

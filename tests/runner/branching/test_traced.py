"""Stopping processes by their pidfds."""

import contextlib
import os
import select
import signal
from collections.abc import Iterator

import pytest

from cellwright.runner.branching import traced
from cellwright.runner.branching.layout import NotCopyable
from cellwright.runner.branching.machine import Machine, machine
from cellwright.runner.branching.traced import Traced
from cellwright.runner.kernel import tracing


@pytest.fixture
def known() -> Machine:
    if (here := machine()) is None:
        pytest.skip("this machine has no branches by memory")
    return here


@pytest.fixture
def bystander() -> Iterator[int]:
    pid = _child()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def blocking(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (number,))
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child() -> int:
    pid = os.fork()
    if not pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
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


def test_a_process_that_has_the_number_of_a_dead_target_goes_on(
    known: Machine, bystander: int
) -> None:
    """A target can end, and its number be another process's, between two looks."""
    pidfd = _gone()
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
    with blocking(signal.SIGCHLD):
        tracing.stop(bystander)  # which would find it dead
        tracing.let_go(bystander)


@pytest.mark.parametrize("when", ["_interrupt", "go_on_to_call"])
def test_a_signal_that_comes_to_a_source_meanwhile_is_not_lost(
    known: Machine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """SIGUSR1 ends the process, if it comes to it at last."""
    pid = _child()
    pidfd = os.pidfd_open(pid)
    wrapped = getattr(tracing, when)

    def signalled(pid: int) -> None:
        os.kill(pid, signal.SIGUSR1)
        wrapped(pid)

    monkeypatch.setattr(tracing, when, signalled)
    with blocking(signal.SIGCHLD), pytest.raises(NotCopyable, match="a signal came"):
        Traced(pidfd, known, is_source=True)
    is_lost = not select.select([pidfd], [], [], 5.0)[0]
    os.close(pidfd)
    if is_lost:
        os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGUSR1

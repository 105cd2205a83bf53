"""Processes that are traced by one with a single thread, which blocks SIGCHLD, as the branching process.

Run by test_traced.py in a process of its own: in that of the tests another thread would take SIGCHLD.
"""

import os
import select
import signal
import sys

from cellwright.runner.branching import traced
from cellwright.runner.branching.layout import NotCopyable
from cellwright.runner.branching.traced import Machine, Traced, machine
from cellwright.runner.kernel import tracing
from tests.forked import forked


def _wait_for_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
    while True:
        signal.pause()


def stop_dead_target(known: Machine) -> None:
    """Stop a target that has ended, and whose number is another process's when it is looked up."""
    with forked(_wait_for_signals) as bystander:
        with forked(_wait_for_signals) as target:
            gone = os.dup(target.pidfd)

        def trace() -> int:
            traced.number_of = lambda _: bystander.pid  # type: ignore[assignment]
            try:
                Traced(gone, known, is_source=False)
            except ProcessLookupError:
                return 0
            return 1

        with forked(trace) as tracer:
            assert tracer.wait() == 0
        tracing.stop(bystander.pid)  # it would find the process dead
        tracing.let_go(bystander.pid)


def signal_source(known: Machine, when: str) -> None:
    """Send SIGUSR1 to a source at a step of tracing: it ends the process if it comes to it at last."""
    wrapped = getattr(tracing, when)

    def signalled(pid: int) -> None:
        os.kill(pid, signal.SIGUSR1)
        wrapped(pid)

    setattr(tracing, when, signalled)
    with forked(_wait_for_signals) as source:
        try:
            Traced(source.pidfd, known, is_source=True)
        except NotCopyable as refused:
            assert "a signal came" in str(refused)
        else:
            raise AssertionError("it was stopped")
        assert select.select([source.pidfd], [], [], 60.0)[0], "the signal was lost"
        assert source.wait() == -signal.SIGUSR1


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    here = machine()
    assert here
    {each.__name__: each for each in (stop_dead_target, signal_source)}[sys.argv[1]](
        here, *sys.argv[2:]
    )

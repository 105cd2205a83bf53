"""Counts of what one tool call takes: they hold on any machine, however busy it is."""

import select
import socket
import sys
import threading
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest

from cellwright import Sandbox
from cellwright.runner.watching import calls

CALLS = 50
PROGRAM = f"from tools import increment\nfor n in range({CALLS}): increment(n=n)"
_SYSTEM_CALLERS = (socket.SocketType, select.epoll, type(select.poll()))


class Counts:
    """Python calls, system calls and waits for work of every thread, at each call of the tool."""

    def __init__(self) -> None:
        self.python = self.system = self.handed_over = 0
        self.marks: list[tuple[int, int, int]] = []

    def increment(self, n: int) -> int:
        """Add one."""
        self.marks.append((self.python, self.system, self.handed_over))
        return n + 1

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            owner = arg.__self__
            self.system += isinstance(owner, _SYSTEM_CALLERS) or arg.__module__ == "posix"
            self.handed_over += isinstance(owner, SimpleQueue) and arg.__name__ == "put"

    def of_the_cheapest_call(self) -> tuple[int, ...]:
        """Return the least of each count from one call to the next: threads may be interrupted."""
        steps = [
            [after - before for before, after in zip(*pair, strict=True)]
            for pair in zip(self.marks, self.marks[1:], strict=False)
        ]
        return tuple(map(min, zip(*steps, strict=True)))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    monkeypatch.setattr(calls, "_WORKERS", calls._Workers())  # new threads: they are counted
    return Counts()


@pytest.mark.needs("cgroup")
def test_a_call_from_a_cell_takes_few_python_calls_and_system_calls_of_the_host(
    counts: Counts,
) -> None:
    with Sandbox(tools=[counts.increment]) as sandbox:
        before = threading.getprofile()
        threading.setprofile(counts.note)
        sys.setprofile(counts.note)
        try:
            result = sandbox.execute(PROGRAM)
        finally:
            sys.setprofile(None)
            threading.setprofile(before)
        assert result.ok, result.error
        assert len(counts.marks) == CALLS
        python, system, handed_over = counts.of_the_cheapest_call()
        assert handed_over == 0  # the thread that answered has heard the next call
        assert 0 < system <= 3  # poll, recv, send
        assert 0 < python <= 43
        assert [entry.action for entry in sandbox.audit.get_entries(category="tool")].count(
            "call"
        ) == CALLS


COUNTING = """
import sys
from tools import increment

made = 0

def note(frame, event, arg):
    global made
    made += event == "call"

def count():
    global made
    began, _ = made, increment(n=1)
    return made - began

sys.setprofile(note)
counted = [count() for _ in range(50)]
sys.setprofile(None)
min(counted)
"""


@pytest.mark.needs("cgroup")
def test_a_call_takes_few_python_calls_of_the_guest() -> None:
    def increment(n: int) -> int:
        """Add one."""
        return n + 1

    with Sandbox(tools=[increment]) as sandbox:
        result = sandbox.execute(COUNTING)
    assert result.ok, result.error
    assert 0 < result.value <= 8

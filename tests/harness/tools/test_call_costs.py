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
from cellwright.runner.watching import open_calls as calls

CALLS = 50
PROGRAM = f"from tools import increment\nfor n in range({CALLS}): increment(n=n)"
IN_JAVASCRIPT = f"for (let n = 0; n < {CALLS}; n++) tools.increment({{n}})"
IN_BASH = f'for ((n = 0; n < {CALLS}; n++)); do cellwright-call increment "{{\\"n\\":$n}}"; done >/dev/null'
_POLL = type(select.poll())

_SYSTEM_MODULES = ("posix", "fcntl", "_socket")


def is_system_call(function: Any) -> bool:
    """Tell whether a function of C makes a system call, of those that a tool call uses."""
    owner, name = function.__self__, function.__name__
    if isinstance(owner, _POLL):
        return name == "poll"
    if isinstance(owner, socket.SocketType | select.epoll):
        return name not in ("fileno", "detach")
    return function.__module__ in _SYSTEM_MODULES and name != "fspath"


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
            self.system += is_system_call(arg)
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
@pytest.mark.parametrize(
    ("language", "program", "most_python", "most_system"),
    [
        ("python", PROGRAM, 39, 2),  # recv, send
        pytest.param(
            "javascript", IN_JAVASCRIPT, 39, 2, marks=pytest.mark.needs("node"), id="javascript"
        ),
        # The shell opens a door for each call: /dev/tools is reported, a socket made and handed over,
        # and the poll loop hears the call and sends the answer.
        pytest.param("bash", IN_BASH, 100, 15, id="bash"),
    ],
)
def test_a_call_from_a_cell_takes_few_python_calls_and_system_calls_of_the_host(
    counts: Counts, language: str, program: str, most_python: int, most_system: int
) -> None:
    with Sandbox(tools=[counts.increment]) as sandbox:
        before = threading.getprofile()
        threading.setprofile(counts.note)
        sys.setprofile(counts.note)
        try:
            result = sandbox.execute(program, language)
        finally:
            sys.setprofile(None)
            threading.setprofile(before)
        assert result.ok, result.error
        assert len(counts.marks) == CALLS
        python, system, handed_over = counts.of_the_cheapest_call()
        # Without doors the thread that answered has heard the next call.  A door is given by a thread of
        # its own, and the call comes by the poll loop.
        assert handed_over == (2 if language == "bash" else 0)
        assert 0 < system <= most_system
        assert 0 < python <= most_python
        assert [entry.action for entry in sandbox.audit.get_entries(category="tool")].count(
            "call"
        ) == CALLS


COUNTING = """
import sys
from tools import increment

made = asked = 0
sock = increment._caller._sock

def note(frame, event, arg):
    global made, asked
    made += event == "call"
    asked += event == "c_call" and (arg.__module__ == "posix" or type(arg.__self__) is type(sock))

def count():
    began, asked_before, _ = made, asked, increment(n=1)
    return made - began, asked - asked_before

sys.setprofile(note)
counted = [count() for _ in range(50)]
sys.setprofile(None)
[min(each) for each in zip(*counted)]
"""


@pytest.mark.needs("cgroup")
def test_a_call_takes_few_python_calls_and_system_calls_of_the_guest() -> None:
    def increment(n: int) -> int:
        """Add one."""
        return n + 1

    with Sandbox(tools=[increment]) as sandbox:
        result = sandbox.execute(COUNTING)
    assert result.ok, result.error
    python, system = result.value
    assert 0 < python <= 8
    assert 0 < system <= 3  # getpid, send, recv


IN_NODE = """
const fs = require("fs"), counted = [];
let asked = 0;
for (const name of ["writeSync", "readSync"]) {
  const before = fs[name];
  fs[name] = (...given) => { asked++; return before(...given); };
}
for (let n = 0; n < 20; n++) {
  const began = asked;
  tools.increment({n});
  counted.push(asked - began);
}
counted
"""


@pytest.mark.needs("cgroup", "node")
def test_a_call_takes_two_system_calls_of_node() -> None:
    def increment(n: int) -> int:
        """Add one."""
        return n + 1

    with Sandbox(tools=[increment]) as sandbox:
        result = sandbox.execute(IN_NODE, "javascript")
    assert result.value == [2] * 20, result

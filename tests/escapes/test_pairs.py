"""Two living cells of one launcher, seen from the host: nothing of one is the other's."""

import contextlib
import ctypes
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.benchmarks.census import children
from cellwright.testing import inspect
from tests.conftest import policy_named, soon
from tests.escapes.live_cell import status
from tests.faults.injection import numbers

pytestmark = pytest.mark.needs("root")
# kcmp(2): what it compares, and its answer for one and the same.
KCMP_FILE = 0
SHARED_BY_CLONE = {"memory": 1, "descriptors": 2, "directories": 3, "signal handlers": 4}
SAME = 0
ROW_LAYOUT = struct.Struct("=4i")  # struct cell of steps.c
ROW = ROW_LAYOUT.size
_LIBC = ctypes.CDLL(None, use_errno=True)

WAITS = "import threading\nprint('up', flush=True)\nthreading.Event().wait(60)"


@pytest.fixture(scope="module", params=["on demand", "parked", "sessions"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    """The guests of two cells in which programs wait, and their launcher."""
    parked = 2 if request.param == "parked" else 0
    with (
        Sandbox(policy=policy_named("strict"), pool=parked) as box,
        contextlib.ExitStack() as stack,
    ):
        box.settle()
        launcher = inspect(box).supervisor.generation.launcher.pids()[2]
        guests = set(children(launcher))
        for _ in range(2):
            if request.param == "sessions":
                stack.enter_context(box.session()).execute("1")
                continue
            run = box.start(WAITS)
            next(run.output())
            stack.callback(run.result)
            stack.callback(run.cancel)
        box.settle()
        assert soon(lambda: waits_for_events(launcher))  # it closes what it sent a moment ago
        one, other = sorted(guests or children(launcher))
        yield one, other, launcher


def test_two_cells_share_no_open_file_and_no_object_of_a_process(
    pair: tuple[int, int, int],
) -> None:
    """Asks the kernel by kcmp(2), which first says that a process shares all of that with itself."""
    for one, other in itertools.permutations(pair, 2):
        for kind in SHARED_BY_CLONE.values():
            assert kcmp(one, one, kind) == SAME
            assert kcmp(one, other, kind) != SAME
        assert kcmp(one, one, KCMP_FILE, 0, 0) == SAME
        both = itertools.product(descriptors(one), descriptors(other))
        same = [each for each in both if kcmp(one, other, KCMP_FILE, *each) == SAME]
        assert same == []


def test_a_page_that_one_cell_writes_is_no_other_processs(pair: tuple[int, int, int]) -> None:
    """Writes to each writable mapping of a cell, as if the cell did (proc_pid_mem(5)), and looks into
    the other cell and into the launcher."""
    written = 0
    for one, other in itertools.permutations(pair[:2], 2):
        places = [place for place in writable(one) if place in writable(other)]
        for place in places:
            before = [byte_at(pid, place) for pid in pair]
            flipped = bytes([before[pair.index(one)][0] ^ 0xFF])
            write_at(one, place, flipped)
            after = [byte_at(pid, place) for pid in pair]
            write_at(one, place, before[pair.index(one)])
            assert after == [
                flipped if pid == one else was for pid, was in zip(pair, before, strict=True)
            ]
            written += 1
    assert written > 50


def test_no_memory_that_a_cell_can_write_is_shared(pair: tuple[int, int, int]) -> None:
    for guest in pair[:2]:
        lines = Path(f"/proc/{guest}/maps").read_text().splitlines()
        assert len(lines) > 50
        assert [line for line in lines if {"w", "s"} <= set(line.split()[1])] == []


def test_a_cell_is_not_told_which_other_cells_its_launcher_has(pair: tuple[int, int, int]) -> None:
    """The launcher's table of cells is not in a copy of its memory that a later cell has."""
    one, other, launcher = pair
    first, second = sorted((one, other), key=lambda pid: int(number_within(pid)))
    # The first cell's row is the first of a mapping, and begins with the number of its process.
    number = number_within(first).to_bytes(4, "little")
    starts = [
        place for place in writable(launcher) if memory_of(launcher, place, place + 4) == number
    ]
    (table,) = (place for place in starts if is_row_of_cell(launcher, place))
    with contextlib.suppress(OSError):  # not mapped at all
        seen = memory_of(second, table, table + ROW)
        assert seen != memory_of(launcher, table, table + ROW)


def waits_for_events(pid: int) -> bool:
    call = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return call in {str(numbers().get(name)) for name in ("epoll_wait", "epoll_pwait")}


def kcmp(one: int, other: int, kind: int, *descriptors: int) -> int:
    answer: int = _LIBC.syscall(numbers()["kcmp"], one, other, kind, *(descriptors or (0, 0)))
    assert answer >= 0, os.strerror(ctypes.get_errno())
    return answer


def descriptors(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/fd")]


def spans(pid: int) -> list[tuple[int, int]]:
    """Return where memory of a process lies that it can write."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if rights.startswith("rw"):
            start, end = (int(each, 16) for each in span.split("-"))
            found.append((start, end))
    return found


def writable(pid: int) -> list[int]:
    return [start for start, _ in spans(pid)]


def memory_of(pid: int, start: int, end: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), end - start, start)


def byte_at(pid: int, place: int) -> bytes:
    try:
        return memory_of(pid, place, place + 1)
    except OSError:  # the launcher may not have it
        return b""


def write_at(pid: int, place: int, data: bytes) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        assert os.pwrite(memory.fileno(), data, place) == len(data)


def number_within(pid: int) -> int:
    """Return the number of a guest's process in its launcher's pid namespace."""
    return int(status(pid)["NSpid"].split()[-2])


def is_row_of_cell(launcher: int, place: int) -> bool:
    """Tell whether a number there is followed by two pidfds and a socket, as in steps.c's table of cells."""
    opened = []
    for number in ROW_LAYOUT.unpack(memory_of(launcher, place, place + ROW))[1:]:
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/{launcher}/fd/{number}"))
    return ["pidfd" in name for name in opened] == [True, True, False]

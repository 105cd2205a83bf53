"""Supervision against a scripted cell: socket pairs in place of launcher, init and guest."""

import contextlib
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NoReturn

import msgspec
import pytest

from cellwright.policies.errors import CellwrightError, InternalError, LaunchError
from cellwright.policies.policy import Limits
from cellwright.runner import channel
from cellwright.runner.cells.cell import Cell
from cellwright.runner.cells.held_cell import HeldCell
from cellwright.runner.cgroups.cgroup_tree import Cgroup
from cellwright.runner.messages import (
    Ended,
    Failed,
    Finished,
    Ready,
    encode,
)
from cellwright.runner.requests.request import OnOutput
from cellwright.runner.watching.guest_channel import Capture
from cellwright.runner.watching.supervision import Observation, Supervision, Work
from tests.conftest import open_descriptors, soon

LIMITS = Limits(wall_seconds=0.3)
DONE = Finished(b"5", None, None, None)
KILLED = Ended(9, 0.0, 0.0, 0)


class FakeCell(Cell):
    """A cell whose other ends stay here, and whose init is a process that sleeps."""

    def __init__(self) -> None:
        super().__init__(Cgroup())
        self.killed = threading.Event()
        self.init = subprocess.Popen(["sleep", "600"])

    def kill_init(self) -> None:
        self.killed.set()
        self.init.kill()

    def close(self) -> None:
        super().close()
        self.init.kill()
        self.init.wait()

    # frames of launcher, init and guest

    def says(self, frame: object, *descriptors: int) -> None:
        channel.send(self._their_status, encode(frame), descriptors)  # type: ignore[arg-type]

    def is_ready(self) -> None:
        pidfd = os.pidfd_open(self.init.pid)
        with tempfile.TemporaryDirectory() as directory:  # its mode is that of a workspace
            workspace = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.says(Ready(listens=False), pidfd, pidfd, workspace)
        os.close(pidfd)
        os.close(workspace)

    def guest_says(self, frame: bytes) -> None:
        channel.send(self._their_control, frame)

    def ends(self, wait_status: int = 0) -> None:
        self.says(Ended(wait_status, 0.0, 0.0, 0))


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    made = FakeCell()
    yield made
    made.close()


def supervise(
    cell: FakeCell, limits: Limits = LIMITS, cancel: int = -1, on_output: OnOutput | None = None
) -> Observation:
    captures = tuple(
        Capture(name, getattr(cell, name), limits.output_bytes, on_output)
        for name in ("stdout", "stderr")
    )
    held = held_cell_of(cell)
    held.prepare()
    seen = Supervision(held, Work(b"request", b"", limits, captures, cancel)).run()
    return msgspec.structs.replace(seen, sent_at=0.0)


class FakeOrigin:
    """A launcher that is there, and hears nothing."""

    plan = SimpleNamespace(devices=())

    def __init__(self) -> None:
        self.freed: list[Cell] = []

    def is_alive(self) -> bool:
        return True

    def is_current(self) -> bool:
        return True

    def uncovered(self) -> str:
        return ""

    def lose(self) -> None:
        self.lost = True

    listens = False

    def give_up(self) -> None:
        self.given_up = True

    def listen(self, descriptor: int) -> NoReturn:
        raise AssertionError("this cell has no listener")

    def connect(self, sockets: list[int]) -> None:
        assert sockets == []

    def free(self, cell: Cell) -> None:
        self.freed.append(cell)


def held_cell_of(cell: FakeCell) -> HeldCell:
    return HeldCell(cell, FakeOrigin())


def reap_once_killed(cell: FakeCell) -> threading.Thread:
    def work() -> None:
        if cell.killed.wait(60):
            cell.says(KILLED)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_an_honest_cell_in_the_documented_order(cell: FakeCell) -> None:
    cell.is_ready()
    cell.guest_says(encode(DONE))
    cell.ends(3 << 8)
    seen = supervise(cell)
    assert seen == Observation(None, 3 << 8, DONE, None, captures=seen.captures)
    assert channel.Receiver(cell._their_control, 100).receive_whole() == b"request"
    assert not cell.killed.is_set()


def test_a_last_word_that_comes_with_the_end_is_heard(cell: FakeCell) -> None:
    cell.is_ready()
    cell.ends()
    cell.guest_says(encode(DONE))
    os.write(cell._their_stdout, b"late")
    assert supervise(cell).finished == DONE


HOSTILE: dict[str, Callable[[FakeCell], None]] = {
    "garbage": lambda cell: cell.guest_says(b"garbage"),
    "an empty frame": lambda cell: cell.guest_says(b""),
    "another's frame": lambda cell: cell.guest_says(encode(Ended(0, 0.0, 0.0, 0))),
    "two frames": lambda cell: [cell.guest_says(encode(DONE)) for _ in range(2)] and None,
    "no mark": lambda cell: cell._their_control.send(b"\x07") and None,
    "deep nesting": lambda cell: cell.guest_says(b"\x91" * 60_000),
    "no UTF-8": lambda cell: cell.guest_says(b"\x95\xa8Finished\xc0\xa1\xff\xc0\xc0"),
}


@pytest.mark.parametrize("speak", HOSTILE.values(), ids=HOSTILE)
def test_a_guest_that_breaks_the_protocol_is_killed_for_it(
    cell: FakeCell, speak: Callable[[FakeCell], None]
) -> None:
    cell.is_ready()
    speak(cell)
    reaper = reap_once_killed(cell)
    seen = supervise(cell)
    reaper.join(60)
    assert seen.cause == "violation"
    assert seen.complaint
    assert cell.killed.is_set()


def test_a_value_larger_than_allowed_is_a_violation(cell: FakeCell) -> None:
    cell.is_ready()
    limits = msgspec.structs.replace(LIMITS, value_bytes=1000)
    frame = encode(Finished(bytes(400_000), None, None, None))

    def speak() -> None:
        with contextlib.suppress(ConnectionError):  # it is not read to its end
            cell.guest_says(frame)

    sender = threading.Thread(target=speak)
    sender.start()
    reaper = reap_once_killed(cell)
    assert supervise(cell, limits).cause == "violation"
    reaper.join(60)
    cell.control.close()  # lets the sender go, were it waiting for room
    sender.join(60)


def test_a_deaf_guest_that_never_reads_its_program_is_timed_out(cell: FakeCell) -> None:
    cell.is_ready()
    reaper = reap_once_killed(cell)
    assert supervise(cell).cause == "wall_time"
    reaper.join(60)


def test_limits_may_be_longer_than_poll_can_wait(cell: FakeCell) -> None:
    """poll(2) counts milliseconds in an int: after 24 days it says that the timeout is too large."""
    cell.is_ready()
    cell.ends()
    limits = msgspec.structs.replace(LIMITS, wall_seconds=1e9, cpu_seconds=1e9)
    assert supervise(cell, limits).wait_status == 0


def test_a_guest_that_hangs_up_may_still_end_well(cell: FakeCell) -> None:
    cell.is_ready()
    cell._their_control.close()
    cell.ends()
    seen = supervise(cell)
    assert (seen.cause, seen.wait_status, seen.finished) == (None, 0, None)


def test_a_guest_that_closes_its_streams_costs_no_time(cell: FakeCell) -> None:
    cell.is_ready()
    os.close(cell._their_stdout)
    os.close(cell._their_stderr)
    cell._their_stdout = cell._their_stderr = -1
    cell.ends()
    assert supervise(cell).wait_status == 0


def test_cancelling_ends_it(cell: FakeCell) -> None:
    cancel = os.eventfd(1)
    cell.is_ready()
    reaper = reap_once_killed(cell)
    assert supervise(cell, cancel=cancel).cause == "cancelled"
    reaper.join(60)
    os.close(cancel)


def test_a_guest_that_reports_a_good_end_is_not_waited_for(cell: FakeCell) -> None:
    cell.is_ready()
    well = msgspec.structs.replace(DONE, ends_well=True)
    cell.guest_says(encode(well))
    seen = supervise(cell)
    assert seen == Observation(None, None, well, None, captures=seen.captures)


def test_a_cell_is_killed_and_waited_for_before_it_is_freed(cell: FakeCell) -> None:
    origin = FakeOrigin()
    cell.is_ready()
    held = HeldCell(cell, origin)
    held.prepare()
    reaper = reap_once_killed(cell)
    held.dispose()
    reaper.join(60)
    assert cell.init.wait() < 0
    assert origin.freed == [cell]


def test_a_cell_whose_launcher_died_is_freed_all_the_same(cell: FakeCell) -> None:
    origin = FakeOrigin()
    held = HeldCell(cell, origin)
    cell._their_status.close()
    with pytest.raises(LaunchError):
        held.dispose()
    assert origin.freed == [cell]


def test_a_parked_cell_is_alive_until_its_launcher_is_not(cell: FakeCell) -> None:
    cell.is_ready()
    held = held_cell_of(cell)
    held.prepare()
    assert held.is_alive()
    cell._their_status.close()
    assert not held.is_alive()


def test_the_cause_is_the_first_one(cell: FakeCell) -> None:
    cell.is_ready()
    cell.guest_says(b"garbage")
    cancel = os.eventfd(0)

    def work() -> None:
        if cell.killed.wait(60):
            os.eventfd_write(cancel, 1)
            cell.says(KILLED)

    thread = threading.Thread(target=work)
    thread.start()
    assert supervise(cell, cancel=cancel).cause == "violation"
    thread.join(60)
    os.close(cancel)


def test_an_end_that_was_reported_is_not_blamed_on_what_comes_after(cell: FakeCell) -> None:
    cell.is_ready()
    cell.says(Ended(0, 0.0, 0.0, 0))
    cell.guest_says(encode(DONE))
    cancel = os.eventfd(0)
    assert supervise(cell, cancel=cancel).cause is None
    os.close(cancel)


OURS: dict[str, Callable[[FakeCell], None]] = {
    "set-up failed": lambda cell: cell.says(Failed(1, "mount: Operation not permitted")),
    "the launcher died": lambda cell: cell._their_status.close(),
}


@pytest.mark.parametrize("speak", OURS.values(), ids=OURS)
def test_what_we_could_not_do_is_an_exception(
    cell: FakeCell, speak: Callable[[FakeCell], None]
) -> None:
    speak(cell)
    with pytest.raises(LaunchError):
        supervise(cell)


def test_the_failed_step_is_named(cell: FakeCell) -> None:
    cell.says(Failed(1, "mount: Operation not permitted"))
    with pytest.raises(LaunchError, match="mount: Operation not permitted"):
        supervise(cell)


def says_raw(cell: FakeCell, wait_status: int, seconds: float, max_rss_bytes: int) -> None:
    """Say that the cell is ready, and that it ended with what no Ended frame may have."""
    cell.is_ready()
    ended = ("Ended", wait_status, seconds, 0.0, max_rss_bytes)
    channel.send(cell._their_status, msgspec.msgpack.encode(ended))


DISORDER: dict[str, Callable[[FakeCell], None]] = {
    "ready without its descriptors": lambda cell: cell.says(Ready(listens=False)),
    "ready without a listener": lambda cell: cell.says(Ready(listens=True), 0, 1, 2),
    "garbage": lambda cell: channel.send(cell._their_status, b"garbage"),
    "the guest's frame": lambda cell: cell.says(DONE),
    "the end of a process that only stopped": lambda cell: says_raw(cell, 0x137F, 0.0, 0),
    "a negative time": lambda cell: says_raw(cell, 0, -1.0, 0),
    "a time that is no number": lambda cell: says_raw(cell, 0, math.nan, 0),
    "a time without end": lambda cell: says_raw(cell, 0, math.inf, 0),
    "more memory than there is": lambda cell: says_raw(cell, 0, 0.0, 1 << 63),
    "a frame in two packets": lambda cell: cell._their_status.send(b"\x01x") and None,
}


@pytest.mark.parametrize("speak", DISORDER.values(), ids=DISORDER)
def test_disorder_on_the_status_channel_is_an_error_of_ours(
    cell: FakeCell, speak: Callable[[FakeCell], None]
) -> None:
    """Init shares the guest's uid; should it ever lie, callers must see an error from our tree."""
    speak(cell)
    with pytest.raises(CellwrightError):
        supervise(cell)


BESIDE_NONSENSE = {
    "garbage": [b"\0garbage"],
    "an empty frame": [b"\0"],
    "no frame": [b""],
    "the guest's frame": [b"\0" + encode(DONE)],
    "the same again": [b"\0" + encode(Ready(listens=True))],
}


@pytest.mark.parametrize("packets", BESIDE_NONSENSE.values(), ids=BESIDE_NONSENSE)
def test_descriptors_beside_what_makes_no_sense_are_closed(packets: list[bytes]) -> None:
    before = open_descriptors()
    cell = FakeCell()
    origin = FakeOrigin()
    held = HeldCell(cell, origin)
    for packet in packets:
        channel.send_packet(cell._their_status, packet, (0,))
    for _ in packets[1:]:
        held.receive()
    with pytest.raises(InternalError):
        held.receive()
    assert origin.given_up
    cell.close()
    assert open_descriptors() <= before


def test_unexpected_descriptors_are_closed(cell: FakeCell) -> None:
    cell.is_ready()
    before = open_descriptors()
    cell.says(Ended(0, 0.0, 0.0, 0), 0, 1, 2)
    with contextlib.suppress(CellwrightError):  # refused or ignored, but never kept
        supervise(cell)
    owned = 3  # pidfds and workspace, which the cell closes
    assert open_descriptors() <= before + owned


def test_what_ended_in_time_has_ended_well_however_late_that_is_noticed(cell: FakeCell) -> None:
    """As when this process is stopped, or a callback takes long: the deadline comes meanwhile."""
    cell.is_ready()
    due = time.monotonic() + LIMITS.wall_seconds

    def heard(*_: object) -> None:
        cell.guest_says(encode(DONE))
        cell.ends()
        assert soon(lambda: time.monotonic() > due + LIMITS.wall_seconds)

    os.write(cell._their_stdout, b"x")
    seen = supervise(cell, on_output=heard)
    assert (seen.cause, seen.finished, seen.wait_status) == (None, DONE, 0)

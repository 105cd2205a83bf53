"""The sandboxes of a judge: the limit of their number, and the cases that wait for one."""

import threading

import pytest

from cellwright import ClosedError
from cellwright.harness.sandbox.judging.rooms import Rooms
from cellwright.harness.sandbox.judging.verdicts import JudgeLimits
from tests.conftest import soon


def limits(number: int | None) -> JudgeLimits | None:
    return None if number is None else JudgeLimits(memory_bytes=number << 20)


class Made:
    """A sandbox that only notes its end."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Makes:
    """Makes sandboxes; those of 99 MiB once `go_on` is set."""

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, given: JudgeLimits | None) -> Made:
        if given == limits(99):
            self.begun.set()
            assert self.go_on.wait(60)
        self.made.append(Made())
        return self.made[-1]

    def open(self) -> int:
        return sum(not each.is_closed for each in self.made)


def test_no_more_sandboxes_than_that_live_and_a_further_one_waits_for_its_place() -> None:
    make = Makes()
    rooms = Rooms(make, most=2)  # type: ignore[arg-type]
    held, got = threading.Event(), threading.Event()

    def take() -> None:
        held.set()
        with rooms.lent(limits(3), []):
            got.set()

    with rooms.lent(limits(1), []) as first:
        with rooms.lent(limits(2), []), rooms.lent(limits(1), []) as again, rooms.lent(None, []):
            assert again._room is first._room  # type: ignore[attr-defined]
            waiting = threading.Thread(target=take)
            waiting.start()
            assert held.wait(60)
            assert not got.is_set()
            assert (len(make.made), make.open()) == (3, 3)
        assert got.wait(60)  # the second has made room
        waiting.join(60)
        assert (len(make.made), make.open()) == (4, 3)
        assert not first._room.is_closed  # type: ignore[attr-defined]
    rooms.close()
    assert make.open() == 0
    with pytest.raises(ClosedError), rooms.lent(limits(1), []):
        pass


def test_a_slow_sandbox_keeps_no_other_waiting_and_is_made_once() -> None:
    make = Makes()
    rooms = Rooms(make)  # type: ignore[arg-type]
    got: list[object] = []

    def take() -> None:
        with rooms.lent(limits(99), []) as room:
            got.append(room)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for each in threads:
        each.start()
    assert make.begun.wait(60)
    with rooms.lent(limits(1), []):
        assert len(make.made) == 1
    make.go_on.set()
    assert soon(lambda: len(got) == 3)
    for each in threads:
        each.join(60)
    assert len(make.made) == 2
    rooms.close()


def test_a_sandbox_that_is_made_while_all_are_closed_is_closed_too() -> None:
    make = Makes()
    rooms = Rooms(make)  # type: ignore[arg-type]
    failed: list[BaseException] = []

    def take() -> None:
        try:
            with rooms.lent(limits(99), []):
                pass
        except ClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert make.begun.wait(60)
    rooms.close()
    make.go_on.set()
    thread.join(60)
    assert (len(failed), make.open()) == (1, 0)

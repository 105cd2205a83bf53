"""The listener of a session between two requests: its reports, its rests, and its end."""

import math
import os
import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cellwright.runner.sessions import attention
from cellwright.runner.sessions.attention import SessionAttention


class Notified:
    """A listener with some notifications; its descriptor is an eventfd that counts them."""

    def __init__(self, count: int) -> None:
        self.descriptor = os.eventfd(count, os.EFD_SEMAPHORE)
        self.answered, self.is_flooded, self.rests = 0, False, False
        self.locks = SimpleNamespace(needs_look=False, look_again=lambda: "")

    def answer(self) -> None:
        os.eventfd_read(self.descriptor)
        self.answered += 1

    def needs_rest(self) -> bool:
        return self.rests


@pytest.fixture
def epoll() -> Iterator[select.epoll]:
    with select.epoll() as made:
        yield made


def between(epoll: select.epoll, notified: Notified) -> SessionAttention:
    cell = SimpleNamespace(listener=notified.descriptor)
    made = SessionAttention(SimpleNamespace(cell=cell, listener=notified))  # type: ignore[arg-type]
    made.begin(epoll)
    return made


def test_it_is_reported_unless_a_request_runs(epoll: select.epoll) -> None:
    notified = Notified(1)
    listener = between(epoll, notified)
    assert epoll.poll(0) == [(notified.descriptor, select.EPOLLIN)]
    with listener.away():
        assert epoll.poll(0) == []
    assert (listener.answer(), notified.answered, epoll.poll(0)) == ("", 1, [])


def test_only_some_are_answered_at_once(epoll: select.epoll) -> None:
    notified = Notified(1000)
    listener = between(epoll, notified)
    assert listener.answer() == ""
    assert notified.answered == attention._AT_ONCE
    assert epoll.poll(0)  # the rest is reported again


def test_a_cell_that_opens_too_much_rests_and_is_attended_to_again(epoll: select.epoll) -> None:
    notified = Notified(3)
    notified.rests = True
    listener = between(epoll, notified)
    assert (listener.answer(), notified.answered, epoll.poll(0)) == ("", 1, [])
    assert listener.again_at < math.inf
    notified.rests = False
    assert (listener.answer(), notified.answered, listener.again_at) == ("", 3, math.inf)


def test_a_flood_and_a_trick_with_locks_are_told(epoll: select.epoll) -> None:
    notified = Notified(1)
    notified.is_flooded = True
    assert "too many refused calls" in between(epoll, notified).answer()
    tricked = Notified(1)
    tricked.locks = SimpleNamespace(needs_look=True, look_again=lambda: "it locked a host file")
    listener = between(epoll, tricked)
    assert listener.answer() == "it locked a host file"
    assert listener.again_at < math.inf


def test_an_end_is_no_news(epoll: select.epoll) -> None:
    """A pipe without a writer reports POLLHUP for ever, as a listener without processes does."""
    notified = Notified(0)
    read, write = os.pipe()
    notified.descriptor = read
    listener = between(epoll, notified)
    os.close(write)
    assert epoll.poll(0) == [(read, select.EPOLLHUP)]
    assert (listener.answer(), notified.answered, epoll.poll(0)) == ("", 0, [])
    with listener.away():
        listener.close()
    os.close(read)


def test_one_that_was_closed_meanwhile_is_left_alone(epoll: select.epoll) -> None:
    notified = Notified(0)
    listener = between(epoll, notified)
    epoll.unregister(notified.descriptor)
    with listener.away():
        epoll.close()
    listener.close()

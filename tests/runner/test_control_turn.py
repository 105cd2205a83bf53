"""The turn to read a control channel: it passes between the poll loop and the threads of tools."""

import threading
from collections.abc import Iterator

import pytest

from cellwright.policies.policy import Limits
from cellwright.runner import channel
from cellwright.runner.messages import Call, Finished, encode
from cellwright.runner.watching import call_router
from cellwright.runner.watching.call_router import ControlTurn
from cellwright.runner.watching.guest_channel import GuestChannel
from tests.conftest import soon

CALL = channel.packets(encode(Call(1, "x", b"{}")))[0]
ALONE = channel.packets(encode(Call(1, "x", b"{}", alone=True)))[0]
FINISHED = channel.packets(encode(Finished(b"1", None, None, None, ends_well=True)))[0]


class Peers:
    """A control channel with both of its ends, the turn to read it, and what was heard."""

    def __init__(self) -> None:
        self.host, self.guest = channel.pair()
        self.in_threads: list[Call] = []
        self.alarms = 0
        self.guest_channel = GuestChannel(self.host, b"", Limits(), takes_calls=True)
        self.turn = ControlTurn(
            self.host.fileno(), self.guest_channel, self.in_threads.append, self._alarm
        )

    def loop_is_told(self) -> bool:
        return channel.has_news(self.turn.descriptor)

    def wait(self) -> Call | None:
        """Wait for a call as a thread of a tool does, around its answer."""
        self.turn.take()
        return self.turn.wait()

    def close(self) -> None:
        self.turn.close()
        self.host.close()
        self.guest.close()

    def _alarm(self) -> None:
        self.alarms += 1


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def test_a_tools_thread_takes_the_next_call_and_the_loop_what_comes_meanwhile(peers: Peers) -> None:
    peers.guest.send(CALL)
    assert peers.loop_is_told()
    call = peers.wait()
    assert call is not None
    assert call.number == 1
    assert peers.in_threads == [call]
    assert not peers.loop_is_told()
    peers.guest.send(CALL)  # while the tool runs
    assert peers.loop_is_told()
    assert peers.turn.receive()
    assert peers.in_threads == [call]
    assert peers.alarms == 0


def test_the_loop_is_woken_for_what_a_tools_thread_hears_and_is_not_a_call(peers: Peers) -> None:
    peers.guest.send(FINISHED)
    assert peers.wait() is None
    assert peers.guest_channel.finished
    assert peers.alarms == 1
    peers.guest.send(FINISHED)  # one frame too many is still heard
    assert peers.loop_is_told()
    with pytest.raises(channel.ProtocolError, match="after the last one"):
        peers.turn.receive()


def test_a_breach_that_a_tools_thread_hears_is_kept_for_the_loop(peers: Peers) -> None:
    peers.guest.send(b"\0nonsense")
    assert peers.wait() is None
    assert peers.turn.breach
    assert peers.alarms == 1


def test_the_end_of_the_guest_ends_the_wait_of_a_tools_thread(peers: Peers) -> None:
    peers.guest.close()
    assert peers.wait() is None
    assert not peers.guest_channel.is_open
    assert peers.alarms == 1
    assert peers.wait() is None
    assert not peers.loop_is_told()


def test_only_one_thread_waits_and_closing_ends_its_wait(peers: Peers) -> None:
    heard: list[Call | None] = []
    thread = threading.Thread(target=lambda: heard.append(peers.wait()))
    thread.start()
    assert soon(lambda: peers.turn._owner)
    assert peers.wait() is None
    peers.turn.receive()
    peers.turn.close()
    thread.join(60)
    assert heard == [None]
    assert peers.wait() is None
    peers.turn.close()


def test_an_idle_thread_gives_the_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_router, "_IDLE_SECONDS", 0.01)
    peers = Peers()
    assert peers.wait() is None
    assert peers.guest_channel.is_open
    peers.guest.send(CALL)
    assert peers.loop_is_told()
    assert peers.turn.receive()
    peers.close()


def test_what_was_sent_before_the_end_of_a_wait_is_heard(peers: Peers) -> None:
    peers.turn.take()
    peers.guest.send(FINISHED)
    peers.guest_channel.stop_waiting()
    with pytest.raises(BrokenPipeError):
        peers.guest.send(CALL)
    assert peers.turn.wait() is None
    assert peers.guest_channel.finished


def test_the_channel_of_a_session_is_left_open(peers: Peers) -> None:
    peers.guest.send(FINISHED)
    assert peers.wait() is None
    peers.guest_channel.stop_waiting()
    peers.turn.close()
    peers.guest.send(b"\0next")
    assert peers.host.recv(10) == b"\0next"


def test_calls_in_quick_succession_are_not_told_to_the_loop_until_a_tool_takes_long(
    peers: Peers,
) -> None:
    for _ in range(8):
        peers.guest.send(ALONE)
        assert peers.wait()
    assert peers.alarms == 1
    assert peers.turn.wants_looks
    assert peers.turn.look()
    peers.guest.send(ALONE)
    assert peers.wait()
    peers.guest.send(FINISHED)  # while the tool runs
    assert not peers.loop_is_told()
    assert peers.turn.look()  # a call began since the last look
    assert not peers.turn.look()  # the same tool still runs
    assert peers.loop_is_told()
    peers.turn.receive()
    assert peers.guest_channel.finished


def test_the_loop_is_not_asked_to_look_while_calls_come_from_more_than_one_thread(
    peers: Peers,
) -> None:
    for _ in range(20):
        peers.guest.send(CALL)
        assert peers.wait()
        peers.guest.send(CALL)
        assert peers.loop_is_told()
        assert peers.turn.receive()
    assert peers.alarms == 0


def test_a_look_leaves_the_turn_to_a_tools_thread_that_waits(peers: Peers) -> None:
    for _ in range(8):
        peers.guest.send(ALONE)
        assert peers.wait()
    assert peers.turn.look()
    heard: list[Call | None] = []
    thread = threading.Thread(target=lambda: heard.append(peers.wait()))
    thread.start()
    assert soon(lambda: peers.turn._owner)
    assert not peers.turn.look()
    peers.guest.send(ALONE)
    thread.join(60)
    assert heard[0]
    peers.guest.send(ALONE)
    assert peers.loop_is_told()  # nothing looks any more

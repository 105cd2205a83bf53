"""Calls of tools as the supervisor hears them: mutated frames, threads, and what is left."""

import os
import random
import sys
import threading
import tracemalloc
from collections.abc import Callable

import pytest

from cellwright.policies.policy import Limits
from cellwright.runner import channel
from cellwright.runner.messages import Answer, Call, Finished, decode, encode
from cellwright.runner.watching.guest_channel import GuestChannel
from cellwright.runner.watching.open_calls import _WORKERS, Calls, OnCall
from tests.conftest import open_descriptors, soon
from tests.forked import exit_code_of

FRAMES = [
    encode(Call(1, "weather.get", b'{"city": "Paris"}', "<cell>:1")),
    encode(Call(2**60, "x" * 300, b"[" * 300)),
    encode(Finished(b"1", None, None, None, ends_well=True)),
]
ROUNDS = 100_000


def telling(answer: Callable[[Call], Answer]) -> OnCall:
    """Return what passes on the answer that `answer` returns."""
    return lambda call, tell: tell(answer(call))


def mutated(chance: random.Random) -> bytes:
    """Return a frame that was valid, with something of it changed."""
    frame = bytearray(chance.choice(FRAMES))
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(frame) + 1)
        match chance.randrange(5):
            case 0:
                frame[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del frame[place : place + chance.randint(1, 9)]
            case 2:
                frame[place:place] = chance.randbytes(chance.randint(1, 9))
            case 3:
                frame[place:place] = (
                    chance.choice((b"\xc6", b"\xdd", b"\xdf", b"\xc9")) + b"\xff" * 4
                )
            case 4:
                frame += frame[place:]
    return bytes(frame)[:60_000]


@pytest.mark.slow
def test_mutated_frames_are_calls_breaches_or_nothing_and_leave_nothing() -> None:
    """From a fixed seed: every frame ends as a call, as a last word, or as a ProtocolError."""
    chance = random.Random(1)
    heard = {"calls": 0, "ends": 0, "breaches": 0}

    ours, theirs = channel.pair()
    ours.setblocking(False)
    grew = 0
    for round_number in range(ROUNDS):
        if round_number == ROUNDS // 2:
            tracemalloc.start()
            grew = tracemalloc.get_traced_memory()[0]
        guest_channel = GuestChannel(ours, b"x", Limits(), takes_calls=True)
        marks = chance.choice((b"\0", b"\0", b"\0", b"\1", b"\2", b""))
        theirs.send(marks + mutated(chance) or b"\0")
        try:
            if call := guest_channel.receive_some():
                assert isinstance(call.number, int)
                assert isinstance(call.name, str)
                assert isinstance(call.arguments, bytes)
                heard["calls"] += 1
            heard["ends"] += guest_channel.finished is not None
        except channel.ProtocolError:
            heard["breaches"] += 1
    grew = tracemalloc.get_traced_memory()[0] - grew
    tracemalloc.stop()
    ours.close()
    theirs.close()
    assert min(heard.values()) > ROUNDS // 50, heard
    assert grew < 256 * 1024


def keeping(told: list[int], *, is_full: bool = False) -> Callable[[Answer], bool]:
    """Return what is told of answers, and says that they wait for room if it `is_full`."""

    def tell(answer: Answer) -> bool:
        told.append(answer.number)
        return is_full

    return tell


def test_as_many_calls_as_may_be_open_are_answered_at_the_same_time() -> None:
    meeting, met = threading.Barrier(64, timeout=60), threading.Event()

    def answer(call: Call) -> Answer:
        if not met.is_set():
            meeting.wait()
        return Answer(call.number, b"1")

    told: list[int] = []
    calls = Calls(telling(answer), keeping(told))
    for number in range(64):
        calls.begin(Call(number, "x", b"{}"))
    with pytest.raises(channel.ProtocolError, match="at once"):
        calls.begin(Call(64, "x", b"{}"))
    assert soon(lambda: len(told) == 64)
    assert sorted(told) == list(range(64))
    with pytest.raises(channel.ProtocolError, match="at once"):
        calls.begin(Call(64, "x", b"{}"))  # they were not sent yet
    for number in told:
        calls.sent(number)
    met.set()
    calls.begin(Call(1, "x", b"{}"))  # there is room again, and its number is free
    calls.close()


def test_a_call_that_is_faster_than_the_thread_that_answered_is_no_breach() -> None:
    """It read the answer, and calls before that thread has said that the answer was sent."""
    numbers: list[int] = []

    def settle() -> None:
        for number in numbers:
            calls.sent(number)

    calls = Calls(lambda call, tell: None, keeping([]), settle=settle)
    calls.open(Call(1, "x", b"{}"))
    with pytest.raises(channel.ProtocolError, match="another one"):
        calls.open(Call(1, "x", b"{}"))
    numbers.append(1)
    calls.open(Call(1, "x", b"{}"))
    calls.close()


def test_an_answer_that_comes_too_late_is_dropped_and_no_thread_stays_busy() -> None:
    release = threading.Event()
    answered = []

    def answer(call: Call) -> Answer:
        release.wait(60)
        answered.append(call.number)
        return Answer(call.number, b"1")

    before = open_descriptors()
    told: list[int] = []
    calls = Calls(telling(answer), keeping(told))
    for number in range(5):
        calls.begin(Call(number, "x", b"{}"))
    calls.close()
    calls.close()
    calls.begin(Call(9, "x", b"{}"))
    release.set()
    assert soon(lambda: len(answered) == 5)
    assert told == []
    assert open_descriptors() <= before


def test_an_answer_that_waits_for_room_wakes_the_poll_loop() -> None:
    told: list[int] = []
    calls = Calls(telling(lambda call: Answer(call.number, b"1")), keeping(told, is_full=True))
    calls.begin(Call(1, "x", b"{}"))
    assert channel.has_news(calls.ready, 60)
    assert told == [1]
    calls.close()


def test_answers_of_many_threads_come_whole_and_once() -> None:
    """Each is longer than a packet, and the guest takes them while they are sent."""
    ours, theirs = channel.pair()
    ours.setblocking(False)
    theirs.settimeout(60)
    guest_channel = GuestChannel(ours, b"", Limits(), takes_calls=True)
    sent: list[int] = []
    guest_channel.on_sent = sent.append
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads get in each other's way wherever they can

    def tell(first: int) -> None:
        for number in range(first, first + 20):
            guest_channel.answer(Answer(number, b"x" * 100_000))

    threads = [threading.Thread(target=tell, args=(20 * n,)) for n in range(8)]
    try:
        for thread in threads:
            thread.start()
        receiver, numbers = channel.Receiver(theirs, 1 << 20), []
        while len(numbers) < 160:
            guest_channel.send_some()
            if channel.has_news(theirs.fileno(), 0.01) and (frame := receiver.receive()):
                numbers.append(decode(frame, Answer).number)
    finally:
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()
    assert sorted(numbers) == sorted(sent) == list(range(160))
    ours.close()
    theirs.close()


def test_calls_are_answered_after_a_fork_too() -> None:
    def answered() -> bool:
        calls = Calls(telling(lambda call: Answer(call.number, b"1")), keeping([], is_full=True))
        calls.begin(Call(1, "x", b"{}"))
        came = channel.has_news(calls.ready, 60 if os.getpid() == parent else 5)
        calls.close()
        return came

    parent = os.getpid()
    assert answered()
    soon(lambda: bool(_WORKERS._idle))
    assert exit_code_of(lambda: 0 if answered() else 1) == 0

"""Answers to calls of tools that a guest does not read take only so much memory of the supervisor."""

import contextlib
import socket

from cellwright.policies.policy import Limits
from cellwright.runner.channel import Receiver, pair
from cellwright.runner.messages import Answer, decode
from cellwright.runner.watching.guest_channel import MOST_UNSENT_BYTES, GuestChannel

MIB = 1024 * 1024


def read_all(guest_channel: GuestChannel, guest: socket.socket, count: int) -> list[Answer]:
    receiver = Receiver(guest, 32 * MIB)
    answers: list[Answer] = []
    while len(answers) < count:
        guest_channel.send_some()
        if frame := receiver.receive():
            answers.append(decode(frame, Answer))
    return answers


def test_what_is_beyond_is_dropped_and_told() -> None:
    host, guest = pair()
    with contextlib.closing(host), contextlib.closing(guest):
        guest_channel = GuestChannel(host, b"", Limits(), takes_calls=False)
        value = b'"' + b"x" * (8 * MIB) + b'"'
        for number in range(1, 13):
            guest_channel.answer(Answer(number, value))
        queued = sum(map(len, guest_channel._packets))
        assert queued < MOST_UNSENT_BYTES + MIB
        answers = read_all(guest_channel, guest, 12)
        kinds = [answer.kind for answer in answers]
        assert kinds == [""] * kinds.count("") + ["too_large"] * kinds.count("too_large")
        assert 6 <= kinds.count("") <= 8
        assert f"{len(value)} bytes was dropped" in answers[-1].message
        guest_channel.answer(Answer(13, value))
        assert read_all(guest_channel, guest, 1)[0].value == value

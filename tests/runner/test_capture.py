"""A stream's head and tail are kept, its middle is counted."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.runner.watching.guest_channel import Capture


def captured(pieces: list[bytes], limit: int) -> Capture:
    read, write = os.pipe()
    os.set_blocking(read, False)
    capture = Capture("stdout", read, limit, None)
    try:
        for piece in pieces:
            os.write(write, piece)
            if piece:
                assert capture.read()
        os.close(write)
        assert not capture.read()
    finally:
        os.close(read)
    return capture


TABLE = {
    "nothing": (b"", 10, b"", 0),
    "within": (b"0123456789", 10, b"0123456789", 0),
    "one more": (b"0123456789x", 10, b"01234\n[... 1 bytes dropped ...]\n6789x", 1),
    "odd limit": (b"0123456789", 5, b"012\n[... 5 bytes dropped ...]\n89", 5),
    "limit of one": (b"abc", 1, b"a\n[... 2 bytes dropped ...]\n", 2),
    "limit of none": (b"abc", 0, b"\n[... 3 bytes dropped ...]\n", 3),
    "a character cut in two": ("\u00fc".encode() * 3, 4, None, 2),
}  # fmt: skip


@pytest.mark.parametrize(("data", "limit", "text", "dropped"), TABLE.values(), ids=TABLE)
def test_what_is_kept(data: bytes, limit: int, text: bytes | None, dropped: int) -> None:
    capture = captured([data], limit)
    assert capture.dropped_bytes == dropped
    assert capture.total_bytes == len(data)
    if text is not None:
        assert capture.text() == text.decode()


@given(st.lists(st.binary(max_size=3000), max_size=40), st.integers(0, 5000))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_pieces_give_the_head_and_tail_of_the_whole(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    capture = captured(pieces, limit)
    dropped = max(0, len(whole) - limit)
    assert capture.dropped_bytes == dropped
    assert capture.total_bytes == len(whole)
    text = capture.text()
    if not dropped:
        assert text == whole.decode("utf-8", "replace")
    else:
        head, tail = whole[: limit - limit // 2], whole[len(whole) - limit // 2 :]
        notice = f"\n[... {dropped} bytes dropped ...]\n"
        assert text == head.decode("utf-8", "replace") + notice + tail.decode("utf-8", "replace")


def test_memory_stays_bounded_while_much_passes() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    capture = Capture("stdout", read, 1000, None)
    for _ in range(200):
        os.write(write, bytes(65536))
        capture.read()
    assert len(capture._head) + sum(map(len, capture._tail)) < 300_000
    assert capture.dropped_bytes == 200 * 65536 - 1000
    os.close(write)
    os.close(read)


def test_draining_takes_what_is_left_in_the_pipe() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    heard: list[bytes] = []
    capture = Capture("stdout", read, 100_000, lambda _, data: heard.append(data))
    os.write(write, b"x" * 65536)
    capture.drain()
    assert capture.total_bytes == 65536
    assert b"".join(heard) == b"x" * 65536
    os.close(write)
    os.close(read)


def test_what_is_kept_can_be_asked_for_while_it_grows() -> None:
    """Every answer is of one moment: the tail goes on where the dropped middle ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    capture = Capture("stderr", read, 8000, None)
    enough = threading.Event()

    def fill() -> None:
        number = 0
        while not enough.is_set():
            os.write(write, b"".join(b"%015d\n" % each for each in range(number, number + 250)))
            capture.read()
            number += 250

    writer = threading.Thread(target=fill)
    writer.start()
    answers = set()
    try:
        while len(answers) < 100:
            head, dropped, tail = capture.text().partition("\n[... ")
            count, _, tail = tail.partition(" bytes dropped ...]\n")
            if dropped:
                assert int(tail[:15]) * 16 == len(head) + int(count)
                answers.add(count)
    finally:
        enough.set()
        writer.join()
        os.close(write)
        os.close(read)

"""Streams: a value that comes in several chunks is a token, and what is held back is bounded."""

import random

import pytest

from cellwright import Privacy
from cellwright.harness.privacy.streams import MOST_HELD, StreamGuard

TEXT = (
    "line one\nwrite to ann@example.org, or call +1 202-555-0143;\ncard 4111 1111 1111 1111 "
    "\nAnn\nSmith lives\n-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----\nend"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 64, 1000])
def test_chunks_give_what_the_whole_gives(size: int) -> None:
    scope = Privacy(names=["Ann Smith"]).scope()
    whole, guard, data = scope.text(TEXT), StreamGuard(scope), TEXT.encode()
    parts = [guard.feed(data[place : place + size]) for place in range(0, len(data), size)]
    assert b"".join([*parts, guard.finish()]).decode() == whole
    assert whole.count("pii_") == 5


def test_whole_lines_are_not_held_back() -> None:
    guard = StreamGuard(Privacy(names=["Ann Smith"]).scope())
    assert guard.feed(b"progress 1\n") == b"progress 1\n"
    assert guard.feed(b"prog") == b""
    assert guard.feed("ress \u20ac\n".encode()[:7]) == b""
    assert guard.finish().startswith(b"progress")


def test_what_is_held_back_is_bounded() -> None:
    for line in (b"x" * 100, b"word and ", b"-----BEGIN KEY", b"Ann "):
        guard = StreamGuard(Privacy(names=["Ann Smith"]).scope())
        for _ in range(2000):
            guard.feed(line)
            assert len(guard._held) <= 4 * MOST_HELD + len(line) + 600


def test_a_value_is_not_cut_within_a_long_line() -> None:
    source = random.Random(7)
    scope = Privacy().scope()
    words = [
        source.choice(["lorem", "ann@example.org", "4111 1111 1111 1111"]) for _ in range(3000)
    ]
    data, guard, parts = " ".join(words).encode(), StreamGuard(scope), []
    while data:
        size = source.randint(1, 900)
        parts.append(guard.feed(data[:size]))
        data = data[size:]
    said = b"".join([*parts, guard.finish()]).decode()
    assert "@" not in said
    assert "1111" not in said
    assert scope.reveal(said) == " ".join(words)


def test_bytes_that_are_no_text_are_passed_on() -> None:
    guard = StreamGuard(Privacy().scope())
    assert guard.feed(b"\xff\xfe\n") + guard.finish() == b"\xff\xfe\n"

"""Streams: a value that comes in several chunks is a token, and what is held back is bounded."""

import base64
import random
import re
import textwrap

import pytest

from cellwright import Privacy
from cellwright.harness.privacy.detector import FoundValue
from cellwright.harness.privacy.naming import HOST, PROGRAM, Naming
from cellwright.harness.privacy.scope import PrivacyScope
from cellwright.harness.privacy.streams import MOST_HELD, StreamGuard
from cellwright.privacy import ValueVault

TEXT = (
    "line one\nwrite to ann@example.org, or call +1 202-555-0143;\ncard 4111 1111 1111 1111 "
    "\nAnn\nSmith lives\n-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----\nend"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 64, 1000])
def test_chunks_give_what_the_whole_gives(size: int) -> None:
    scope = Privacy(names=["Ann Smith"]).scope()
    whole, guard, data = scope.text(TEXT, PROGRAM), StreamGuard(scope), TEXT.encode()
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


KEY = b"k" * 32
PIECES = (
    "ann@example.org", "4111 1111 1111 1111", "4111.1111.1111.1111", "536-22-8726", "Ann", "Smith", "Ann\nSmith",
    "DE89 3704 0044 0532 0130 00", "8.8.4.4", "password=", "hunter2hunter2", "https://user:passw0rd@host.example/x",
    "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----", "-----BEGIN ", "ann\u200b@example.org",
    "José Ñandú", base64.b64encode(b"to ann@example.org today").decode(), "\n", "\n", "\r\n", " ", ", ", "word", "12",
    "\u20ac", "e\u0301", "=", ":", "a" * 50, "lorem ipsum " * 400,
)  # fmt: skip


def fresh() -> PrivacyScope:
    """Return a scope that makes the same tokens each time, and knows two names."""
    return Privacy(names=["Ann Smith", "José Ñandú"], vault=ValueVault(KEY)).scope()


def streamed(text: str, source: random.Random, most: int) -> str:
    guard, data, parts = StreamGuard(fresh()), text.encode(), []
    while data:
        size = source.randint(1, most)
        parts.append(guard.feed(data[:size]))
        data = data[size:]
    return b"".join([*parts, guard.finish()]).decode()


@pytest.mark.parametrize("seed", range(40))
def test_random_chunks_of_random_texts_show_no_more_than_the_whole(seed: int) -> None:
    source = random.Random(seed)
    text = "".join(source.choices(PIECES, k=source.choice([5, 20, 60])))
    whole, shown = (
        fresh().text(text, PROGRAM),
        streamed(text, source, source.choice([1, 5, 60, 5000])),
    )
    for piece in PIECES:
        if len(piece) > 6 and "lorem" not in piece:
            assert shown.count(piece) <= whole.count(piece), (piece, shown, whole)


@pytest.mark.parametrize("text", [
    "api_key:\n\n  'zR8kQ2mX7vL4nB9c'\nend", "password\n=\nhunter2hunter2\n",
    "\n".join(textwrap.wrap(base64.b64encode(b"x" * 40 + b" ann@example.org " * 9).decode(), 76)) + "\n.",
    "Ann\n\nSmith\n", "password=Ann\nSmith lives\n",
])  # fmt: skip
def test_a_value_that_goes_on_in_the_next_line_is_held_back(text: str) -> None:
    source = random.Random(1)
    for most in (1, 10, 1000):
        assert streamed(text, source, most) == fresh().text(text, PROGRAM)


def test_the_rest_of_a_key_that_is_too_long_is_dropped() -> None:
    begins, ends = "-----BEGIN RSA PRIVATE KEY-----\n", "-----END RSA PRIVATE KEY-----\n"
    line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n"
    shown = streamed(f"first\n{begins}{line * 600}{ends}last\n", random.Random(1), 700)
    assert re.fullmatch(r"first\npii_secret_\w{8}\nlast\n", shown)
    assert streamed(f"first\n{begins}{line * 600}", random.Random(1), 700).count("MII") == 0


@pytest.mark.parametrize(
    "begins", [b"-----BEGIN RSA PRIVATE KEY-----\n", b"x" * 4000, b"Ann ", b""]
)
@pytest.mark.parametrize(
    "chunk", [b"\n", b"x", b"Ann ", b"-----BEGIN RSA PRIVATE KEY-----\n", b"A" * 64 + b"\n"]
)
def test_small_chunks_cost_no_more_looks_than_large_ones(
    begins: bytes, chunk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a guest that writes single bytes has its supervisor look at the same text for minutes."""
    looked, sound = [0], PrivacyScope.find

    def find(scope: PrivacyScope, text: str, naming: Naming = HOST) -> list[FoundValue]:
        looked[0] += len(text)
        return sound(scope, text, naming)

    monkeypatch.setattr(PrivacyScope, "find", find)
    guard, total = StreamGuard(fresh()), len(begins)
    guard.feed(begins)
    for _ in range(3000):
        guard.feed(chunk)
        total += len(chunk)
    guard.finish()
    assert looked[0] < 80 * total + 100_000

"""Decoding what the other side says: anything but the one type expected is an error, never a crash."""

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.runner.messages import (
    Booted,
    Ended,
    Failed,
    Finished,
    Fork,
    InputFile,
    Ready,
    RunProgram,
    Start,
    Status,
    decode,
    encode,
)
from tests.conftest import ROOT

FRAMES = [
    Ready(True), Ended(256, 1.0, 0.5, 7), Failed(1, "m"), Booted(), Fork(True),
    Finished(b"1", None, None, None), InputFile("p", b"d"),
    RunProgram("c", b"{}", (InputFile("p", b"d"),), {"A": "b"}, 9), Start((InputFile("p", b"d"),)),
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_decodes_to_what_was_encoded(frame: object) -> None:
    assert decode(encode(frame), type(frame)) == frame  # type: ignore[arg-type]


@pytest.mark.parametrize("frame", FRAMES[:3], ids=lambda frame: type(frame).__name__)
def test_a_status_frame_is_told_by_its_tag(frame: object) -> None:
    assert decode(encode(frame), Status) == frame  # type: ignore[arg-type]


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


HOSTILE = {
    "nothing": b"",
    "garbage": b"garbage",
    "another type": encode(Booted()),
    "no tag": packed([b"1", None, None, None]),
    "wrong tag": packed(["Nowhere", b"1", None, None, None]),
    "tag a number": packed([5, b"1", None, None, None]),
    "a field too few": packed(["Finished", b"1", None, None]),
    "a field too many": packed(["Finished", b"1", None, None, None, True, 1]),
    "a map": packed({"type": "Finished", "value": None}),
    "value a number": packed(["Finished", 5, None, None, None]),
    "value text": packed(["Finished", [1], None, None, None]),
    "error a list": packed(["Finished", None, None, [], None]),
    "an exit code too large": packed(["Finished", None, None, None, None, False, [], "", 256]),
    "an exit code below zero": packed(["Finished", None, None, None, None, False, [], "", -1]),
    "an exit code that is text": packed(["Finished", None, None, None, None, False, [], "", "7"]),
    "a nonce that is a number": packed(["Finished", None, None, None, None, False, [], 7]),
    "two frames": encode(Finished(None, None, None, None)) * 2,
    "trailing byte": encode(Finished(None, None, None, None)) + b"\xc0",
    "cut short": encode(Finished(b"12345", None, None, None))[:-3],
    "a length that lies": b"\x95\xa8Finished\xc6\xff\xff\xff\xff",
    "an array length that lies": b"\xdd\xff\xff\xff\xff",
    "text that is no UTF-8": b"\x95\xa8Finished\xc0\xa2\xff\xfe\xc0\xc0",
    "an extension": b"\x95\xa8Finished\xd4\x01\x00\xc0\xc0\xc0",
    "nested arrays": b"\x91" * 100_000,
    "nested in a field": b"\x95\xa8Finished" + b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_frame_is_an_error(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decode(data, Finished)


@given(st.binary(max_size=200))
@settings(max_examples=500, derandomize=True)
def test_any_bytes_decode_or_are_an_error(data: bytes) -> None:
    for kind in (Finished, Status):
        try:
            frame = decode(data, kind)
        except (msgspec.DecodeError, RecursionError):
            continue
        assert decode(encode(frame), kind) == frame


SMALL_STACK = """
import sys, threading
sys.path[:0] = {paths!r}
import msgspec
from cellwright.runner.messages import Finished, decode
from cellwright.runner.requests.outcome import _value
threading.stack_size({kilobytes} * 1024)
thread = threading.Thread(target=lambda: {work})
thread.start()
thread.join()
print("alive")
"""


def survives(work: str, kilobytes: int) -> bool:
    paths = [str(ROOT), *sys.path]
    script = SMALL_STACK.format(paths=paths, kilobytes=kilobytes, work=work)
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return (done.returncode, done.stdout) == (0, "alive\n")


NESTED = [
    "b'\\x91' * 100_000",
    "b'\\x95\\xa8Finished' + b'\\x91' * 100_000",
    "b'\\x81\\xa1a' * 100_000",
]


# An aarch64 gives a thread no less than 128 KiB.
LEAST = max(64, os.sysconf("SC_THREAD_STACK_MIN") // 1024)


@pytest.mark.parametrize("kilobytes", [1024, 256, LEAST])
@pytest.mark.parametrize("nested", NESTED)
def test_a_nested_frame_does_not_crash_a_thread_with_a_small_stack(
    nested: str, kilobytes: int
) -> None:
    """Embedders run us in threads of their own: a crash here would be a crash of theirs."""
    assert survives(f"decode({nested}, Finished)", kilobytes)


@pytest.mark.parametrize("kilobytes", [8192, 1024, 256, 128])
def test_a_nested_value_does_not_crash_a_thread_with_a_small_stack(kilobytes: int) -> None:
    """musl gives threads 128 KiB."""
    assert survives("_value(Finished(b'[' * 1_000_000, None, None, None))", kilobytes)


def test_a_nested_value_does_not_crash_a_process_without_a_recursion_limit() -> None:
    """Embedders raise it; then nothing but the stack stops msgspec."""
    work = "(sys.setrecursionlimit(10**8), _value(Finished(b'[' * 1_000_000, None, None, None)))"
    assert survives(work, 8192)


@pytest.mark.parametrize(
    "value", [r"""'"' + '\\"' * 500_000""", r"""'"' * 1_000_001""", r"""'\\' * 1_000_000"""]
)
def test_a_value_of_quotes_and_brackets_is_looked_at_once(value: str) -> None:
    """Looked at once for each quote, a value of this size would take an hour: `survives` waits less."""
    brackets = "b'[' * 65"
    assert survives(f"_value(Finished(({value}).encode() + {brackets}, None, None, None))", 8192)

"""Decoding what the other side says: anything but the one type expected is an error, never a crash."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.runner.messages import (
    Ended,
    Entered,
    Failed,
    Finished,
    Fork,
    Forked,
    InputFile,
    Reaped,
    Run,
    Status,
    decode,
    encode,
)
from tests.conftest import ROOT

FRAMES = [
    Forked(), Entered(), Fork(True), Failed(1, "m"), Ended(256), Reaped(1.0, 0.5, 7),
    Finished(b"1", None, None, None), InputFile("p", b"d"),
    Run("c", b"{}", (InputFile("p", b"d"),), {"A": "b"}, 9),
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_decodes_to_what_was_encoded(frame: object) -> None:
    assert decode(encode(frame), type(frame)) == frame  # type: ignore[arg-type]


@pytest.mark.parametrize("frame", FRAMES[:2] + FRAMES[3:6], ids=lambda frame: type(frame).__name__)
def test_a_status_frame_is_told_by_its_tag(frame: object) -> None:
    assert decode(encode(frame), Status) == frame  # type: ignore[arg-type]


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


HOSTILE = {
    "nothing": b"",
    "garbage": b"garbage",
    "another type": encode(Forked()),
    "no tag": packed([b"1", None, None, None]),
    "wrong tag": packed(["Nowhere", b"1", None, None, None]),
    "tag a number": packed([5, b"1", None, None, None]),
    "a field too few": packed(["Finished", b"1", None, None]),
    "a field too many": packed(["Finished", b"1", None, None, None, 1]),
    "a map": packed({"type": "Finished", "value": None}),
    "value a number": packed(["Finished", 5, None, None, None]),
    "value text": packed(["Finished", [1], None, None, None]),
    "error a list": packed(["Finished", None, None, [], None]),
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


@pytest.mark.parametrize("stack_kilobytes", [8192, 256, 64])
def test_deep_nesting_is_an_error_even_on_a_small_stack(stack_kilobytes: int) -> None:
    """Embedders run us in threads of their own: a crash here would be a crash of theirs."""
    script = f"""
import sys, threading
sys.path[:0] = {[str(ROOT), *sys.path]!r}
import msgspec
from cellwright.runner.messages import Finished, decode
threading.stack_size({stack_kilobytes} * 1024)
def work():
    for nested in (b"\\x91" * 100_000, b"\\x95\\xa8Finished" + b"\\x91" * 100_000, b"\\x81\\xa1a" * 100_000):
        try:
            decode(nested, Finished)
        except (msgspec.DecodeError, RecursionError):
            print("refused")
    try:
        msgspec.json.decode(b"[" * 100_000)
    except (msgspec.DecodeError, RecursionError):
        print("refused")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 4), done.stderr

"""Frames of the other side decode to a few times their size, whichever part is multiplied."""

import json
from typing import Any

import msgspec
import pytest

from cellwright import Policy, Sandbox
from cellwright.policies.policy import MIB, Limits
from cellwright.runner.messages import (
    MOST_PICTURES,
    Call,
    Finished,
    decode,
    decode_json,
)
from tests.conftest import OPTIONAL
from tests.work import cost_of, multiplied

_TIMES = 8  # the size of a frame
_BESIDES = 256 * 1024
PNG = ("image/png", b"\x89PNG")
GUEST = [
    Finished(b"[1]", "r", "e", "t", True, (PNG, PNG), "n", 1),
    Call(1, "name", b'{"a": 1}', "file:1"),
]
VALUES: list[Any] = [
    [1, "a", [], {}],
    {"a": {"b": [1]}, "c": None},
    [[[]]],
    [{}, {}],
    "text",
    [0.5],
]


def hears(data: bytes, kind: Any) -> None:
    def work() -> Any:
        try:
            return decode(data, kind)
        except msgspec.DecodeError:
            return None

    assert cost_of(work).memory_bytes <= _BESIDES + _TIMES * len(data)


@pytest.mark.parametrize("frame", GUEST, ids=lambda frame: type(frame).__name__)
def test_a_guests_frame_is_no_larger_once_decoded_whatever_is_multiplied(frame: Any) -> None:
    plain = [type(frame).__name__, *msgspec.structs.astuple(frame)]
    for each in multiplied(plain, 100_000):
        hears(msgspec.msgpack.encode(each), Finished | Call)


@pytest.mark.parametrize("value", VALUES, ids=json.dumps)
def test_json_of_a_guest_is_no_larger_once_decoded_whatever_is_multiplied(value: Any) -> None:
    for each in multiplied(value, 30_000):
        data = json.dumps(each, separators=(",", ":")).encode()

        def work(data: bytes = data) -> Any:
            try:
                return decode_json(data)
            except msgspec.DecodeError:
                return None

        assert cost_of(work).memory_bytes <= 8 * MIB + 16 * len(data)


def test_without_the_bound_json_is_many_times_larger() -> None:
    data = b"[" + b"{}," * 400_000 + b"{}]"
    with pytest.raises(msgspec.DecodeError, match="that decode to some"):
        decode_json(data)
    assert cost_of(lambda: msgspec.json.decode(data)).memory_bytes > 16 * len(data)


@pytest.mark.parametrize(
    "value", [list(range(300_000)), [{"id": n, "x": 0.5} for n in range(50_000)]]
)
def test_honest_values_of_megabytes_are_decoded(value: Any) -> None:
    assert decode_json(json.dumps(value).encode()) == value


FORGED = """
import socket, struct, sys
count = {count}
pictures = b"\\xdd" + struct.pack(">I", count) + b"\\x92\\xa9image/png\\xc4\\x00" * count
frame = b"\\x99\\xa8Finished\\xc0\\xc0\\xc0\\xc0\\xc3" + pictures + b"\\xa0\\x00"
control = socket.socket(fileno=3)
size = 64 * 1024 - 1
pieces = [frame[at:at + size] for at in range(0, len(frame), size)]
for piece in pieces[:-1]:
    control.send(b"\\x01" + piece)
control.send(b"\\x00" + pieces[-1])
import time
time.sleep(60)
"""


@pytest.fixture(scope="module")
def sandbox() -> Any:
    policy = Policy(limits=Limits(wall_seconds=20.0), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as box:
        yield box


def test_a_forged_frame_of_many_empty_pictures_ends_the_cell(sandbox: Sandbox) -> None:
    result = sandbox.execute(FORGED.format(count=500_000))
    assert (result.reason, result.artifacts) == ("violation", ())
    assert f"length <= {MOST_PICTURES}" in str(result.error)


def test_empty_pictures_are_no_artifacts(sandbox: Sandbox) -> None:
    result = sandbox.execute(FORGED.format(count=MOST_PICTURES))
    assert (result.reason, result.artifacts) == ("exit", ())


def test_a_program_that_draws_more_than_are_told_keeps_the_first(sandbox: Sandbox) -> None:
    code = "class A:\n    def _repr_png_(self): return b'x'\nfor _ in range(100): display(A())"
    assert len(sandbox.execute(code).artifacts) == MOST_PICTURES

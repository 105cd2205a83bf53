"""Frames that are nearly right: one field, one byte or one length of a valid one changed."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from cellwright.runner.messages import encode

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), "", "x", "\0", "../../etc/shadow", "x" * 5000, b"",
    b"\xff" * 100, b"\xed\xa0\x80", b"[" * 10_000, b'{"x": NaN}', b'{"x":' * 2000, [], [[]] * 50, {}, {"a": {}}, {"": ""},
    {1: 2}, ["Hello", 1], ["Cancel"], ["InputFile", "f", b""], [["InputFile", "/etc/x", b""]], [["InputFile", "a", b""], ["InputFile", "a/b", b""]],
    ["Given", b"", b"{}", [], {}, 0.1, "", []], msgspec.msgpack.Ext(5, b"x"),
)  # fmt: skip
RAW = (
    b"\xdd\xff\xff\xff\xff", b"\x9f" + b"\xc1" * 15, b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\x92\xa5Hello" + b"\xdd\x7f\xff\xff\xff", b"\xc1", b"\x81" * 3000,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value in a frame, that of the frame first."""
    found = [path]
    if isinstance(tree, list):
        for number, each in enumerate(tree):
            found += places(each, (*path, number))
    elif isinstance(tree, dict):
        for key, each in tree.items():
            found += places(each, (*path, key))
    return found


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = list(tree) if isinstance(tree, list) else dict(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def mutated(dice: random.Random, valid: Sequence[msgspec.Struct]) -> bytes:
    """Return one of the `valid` frames in which one thing is not as it was."""
    frame = encode(dice.choice(valid))
    kind = dice.randrange(10)
    if kind < 4:
        tree = msgspec.msgpack.decode(frame)
        return msgspec.msgpack.encode(changed(tree, dice.choice(places(tree)), dice.choice(ODD)))
    if kind > 7:  # the type is right: further in
        tree = msgspec.msgpack.decode(frame)
        path = dice.choice(places(tree)[2:] or [(0,)])
        alike = [each for each in ODD if type(each) is type(value_at(tree, path))]
        return msgspec.msgpack.encode(changed(tree, path, dice.choice(alike or ODD)))
    if kind == 4:
        tree = msgspec.msgpack.decode(frame)
        return msgspec.msgpack.encode([*tree, dice.choice(ODD)])
    if kind == 5:
        return dice.choice(RAW)
    if kind == 6:
        return frame[: dice.randrange(len(frame))] or b"\0"
    at = dice.randrange(len(frame))
    return frame[:at] + bytes([dice.randrange(256)]) + frame[at + 1 :]

"""Limits on JSON before it is decoded: its depth, and the size of the decoded value.

Decoders recurse: on the small stack of an embedding thread, or without a recursion limit, they
crash (msgspec#1033).  And `[[],[],...` decodes to twenty times its size.
"""

import re

import msgspec

_MAX_DEPTH = 64
HARMLESS_BYTES = _MAX_DEPTH  # so few can neither nest too deeply nor decode to much
# An unterminated text matches too: otherwise each quote in it would be tried as the start of another
# text, and 32 KiB would take four seconds.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = re.compile(rb"[^][{}]++")

# The size of one decoded part, in bytes: the object and its place in its container (measured, 3.11).
_ARRAY_BYTES, _OBJECT_BYTES, _MEMBER_BYTES = 64, 232, 40
_MOST_TIMES = 16  # the size of the JSON
_MOST_BESIDES = 8 * 1024 * 1024
_NEVER_LARGE = _MOST_BESIDES // _OBJECT_BYTES  # no byte of JSON decodes to more than an object


def decoded_bytes(data: bytes | bytearray) -> int:
    """Return an upper estimate of the memory that the parts of JSON take once decoded, without
    texts."""
    arrays, objects = data.count(b"["), data.count(b"{")
    return arrays * _ARRAY_BYTES + objects * _OBJECT_BYTES + data.count(b",") * _MEMBER_BYTES


def refuse_large_json(data: bytes | bytearray) -> None:
    """Raise msgspec.DecodeError if `data`, which need not be JSON, decodes to many times its size."""
    if len(data) > _NEVER_LARGE:
        refuse_expansion(len(data), decoded_bytes(data))


def refuse_expansion(length: int, size: int) -> None:
    """Raise msgspec.DecodeError if JSON of `length` bytes must not decode to `size` bytes.

    Both are sums over its parts, so JSON that arrives in parts needs no copy.
    """
    if size > _MOST_BESIDES + _MOST_TIMES * length:
        raise msgspec.DecodeError(f"{length} bytes that decode to some {size}")


def refuse_deep_json(data: bytes) -> None:
    """Raise msgspec.DecodeError if `data`, which need not be JSON, nests too deeply to be decoded."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH:
        return
    depth = deepest = 0
    for bracket in _NO_BRACKETS.sub(b"", _STRINGS.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise msgspec.DecodeError(f"nested {deepest} deep")

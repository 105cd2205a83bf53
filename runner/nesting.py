"""How deep JSON nests, counted before it is decoded: decoders recurse, and on the small stack of an
embedder's thread, or without a recursion limit, they crash (msgspec#1033)."""

import re

import msgspec

_MAX_DEPTH = 64
# A text that has no end is one all the same: otherwise each quote in it would be tried as the beginning
# of another, and 32 KiB would take four seconds.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = re.compile(rb"[^][{}]++")


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

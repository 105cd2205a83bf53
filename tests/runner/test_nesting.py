"""The depth of JSON is counted in one pass, whatever its content: the embedding process waits for that."""

import msgspec
import pytest

from cellwright.runner.channel import refuse_deep_json

DEEP = b"[" * 65
NOT_DEEP = {
    "as deep as may be": b"[" * 64 + b"]" * 64,
    "side by side": b"[" + b"[],{}," * 1000 + b"[]]",
    "brackets in a text": b'["' + DEEP + b'"]',
    "brackets behind an escaped quote": b'["\\"' + DEEP + b'"]',
    "a text that does not end": b'["' + DEEP,
    "a text that ends in the middle of an escape": b'["' + DEEP + b"\\",
}
TOO_DEEP = {
    "lists": DEEP,
    "objects": b'{"a":' * 65,
    "behind a text": b'["\\\\",' + DEEP,
    "behind a text with brackets": b'["]]]]",' + DEEP,
    "far behind": b"[" + b"[]," * 100_000 + DEEP,
}


@pytest.mark.parametrize("data", NOT_DEEP.values(), ids=NOT_DEEP)
def test_what_is_not_deep_passes(data: bytes) -> None:
    refuse_deep_json(data)


@pytest.mark.parametrize("data", TOO_DEEP.values(), ids=TOO_DEEP)
def test_what_is_too_deep_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError, match="deep"):
        refuse_deep_json(data)

"""Digests of short texts."""

import hashlib

import pytest

from cellwright.policies.digest import digest


@pytest.mark.parametrize("data", [b"", b"a", b"x" * 1000])
def test_a_digest_is_that_of_hashlib(data: bytes) -> None:
    assert digest(data) == hashlib.sha256(data).digest()

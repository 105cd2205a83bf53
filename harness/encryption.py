"""`Cipher`: AES-256-GCM for data on disk, with a key that a user names.  Needs the extra `privacy`."""

import os
from typing import Any

from ..policies.errors import PolicyError
from ..policies.extras import how_to_install
from .sources import SecretSource, SecretUnreadable, read_secret

_NONCE_BYTES = 12  # as SP 800-38D recommends
_SHORTEST_KEY = 32  # characters


class WrongKey(Exception):  # noqa: N818 - what happened: the caller says of which file
    """Another key was used, or the data was changed."""


class Cipher:
    """Encrypts pieces of data, each bound to a text that is not encrypted."""

    def __init__(self, key: bytes, what: str) -> None:
        """`key`: 32 bytes; `what`: names in an error what needs the extra."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise PolicyError(
                f"{what} needs the extra `privacy`", how_to_install("privacy")
            ) from None
        self._cipher: Any = AESGCM(key)

    def seal(self, data: bytes | memoryview, bound: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._cipher.encrypt(nonce, data, bound)
        return nonce + sealed

    def open(self, sealed: bytes, bound: bytes) -> bytes:
        """Return the data; raises WrongKey."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._cipher.decrypt(
                sealed[:_NONCE_BYTES], memoryview(sealed)[_NONCE_BYTES:], bound
            )
        except (InvalidTag, ValueError):  # ValueError: a nonce that is too short
            raise WrongKey from None
        return opened


def key_of(given: str | SecretSource) -> bytes:
    """Return the key; raises PolicyError, without it, if it is missing or too short."""
    try:
        text = read_secret(given)
    except SecretUnreadable as error:
        raise PolicyError(f"key: cannot be read: {error}") from None
    if len(text) < _SHORTEST_KEY:
        raise PolicyError(
            f"key: must have at least {_SHORTEST_KEY} characters, got {len(text)}",
            "python3 -c 'import secrets; print(secrets.token_hex(32))' makes one",
        )
    return text.encode()

"""Signatures of URLs of files: access to one file without the token of the sandbox."""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Literal

_OPERATIONS = {"GET": "read", "POST": "write"}
Validity = Literal["valid", "expired", "invalid"]


def validity_of(query: Mapping[str, str], method: str, token: str) -> Validity:
    """Return whether a request for a file has a signature that the holder of `token` made, as E2B's
    clients do, and whether that has expired.

    The signed text joins its parts by colons.  Only the path may hold one, so that each text has one
    reading.
    """
    expiration, user = query.get("signature_expiration", ""), query.get("username", "")
    if method not in _OPERATIONS or ":" in user or (expiration and not expiration.isdecimal()):
        return "invalid"
    parts = [query.get("path", ""), _OPERATIONS[method], user, token]
    text = ":".join([*parts, expiration] if expiration else parts)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    if not hmac.compare_digest(f"v1_{digest}".encode(), query.get("signature", "").encode()):
        return "invalid"
    return "expired" if expiration and int(expiration[:20]) < time.time() else "valid"

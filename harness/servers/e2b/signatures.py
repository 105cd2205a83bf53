"""Signatures of URLs of files: access to one file without the token of the sandbox."""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping

_OPERATIONS = {"GET": "read", "POST": "write"}


def is_signed(query: Mapping[str, str], method: str, token: str) -> bool:
    """Tell whether a request for a file has a signature that the holder of `token` made, as E2B's
    clients do, and that has not expired."""
    expiration = query.get("signature_expiration", "")
    if method not in _OPERATIONS or (expiration and not expiration.isdecimal()):
        return False
    if expiration and int(expiration[:20]) < time.time():
        return False
    parts = [query.get("path", ""), _OPERATIONS[method], query.get("username", ""), token]
    text = ":".join([*parts, expiration] if expiration else parts)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return hmac.compare_digest(f"v1_{digest}".encode(), query.get("signature", "").encode())

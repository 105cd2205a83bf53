"""SHA-256 of short texts without OpenSSL, which takes two milliseconds to load: a command that runs one
program and ends needs nothing else of it.

For large data `hashlib` is several times faster.
"""

import sys

_MODULE = "_sha2" if sys.version_info >= (3, 12) else "_sha256"
try:
    sha256 = __import__(_MODULE).sha256
except ImportError:  # left out of this interpreter
    from hashlib import sha256


def digest(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`."""
    return bytes(sha256(data).digest())

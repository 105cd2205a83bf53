"""Tokens: the words that stand for values, such as `pii_email_7k2q9d3f`.

A token is an identifier in every language of a cell, and survives code, JSON, CSV and markdown.  It is
a keyed hash of scope, kind and value, so it is the same each time and cannot be guessed; its last
character checks the others, so that a mangled one is told from an unknown one.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator
from typing import NamedTuple

from .checksums import luhn_of

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no letter looks like a digit
_CHARACTERS = 7  # 35 bits; a vault gives a value whose token is taken another one
TOKEN = re.compile(
    r"pii_([a-z][a-z0-9]{1,15})_([0-9a-z]{8})(?![A-Za-z0-9_])", re.IGNORECASE
)  # fmt: skip
# The end of an escape, whose letters a token may follow (folding.py).
_ESCAPE = re.compile(
    r"(?:\\(?:[bfnrt]|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2})|%[0-9A-Fa-f]{2}|=[0-9A-F]{2}"
    r"|\\[01][0-7]{2}|(?:\x1b|\\u001[bB]|\\x1[bB]|\\033|\\e)\[[0-?]{0,32}[@-~]"
    r"|\x1b[ -/]{1,4}[0-~]|\[[\d;]{1,32}m|\x9b[0-?]{0,32}[@-~])\Z"
)
_LONGEST_ESCAPE = 40


def make_token(key: bytes, scope: str, kind: str, normal: str, attempt: int = 0) -> str:
    """Return the token of a value; `attempt` counts tokens that other values already have."""
    said = "\0".join((scope, kind, normal, str(attempt))).encode("utf-8", "surrogatepass")
    number = int.from_bytes(hmac.digest(key, said, hashlib.sha256), "big")
    values = [number >> 5 * place & 31 for place in range(_CHARACTERS)]
    return _written(kind, values)


def _written(kind: str, values: list[int]) -> str:
    letters = "".join(_ALPHABET[value] for value in (*values, _check(kind, values)))
    return f"pii_{kind}_{letters}"


def _check(kind: str, values: list[int]) -> int:
    return luhn_of([*(ord(character) % 32 for character in kind), *values], len(_ALPHABET))


def is_intact(token: str) -> bool:
    """Tell whether the last character of a token fits the others."""
    _, kind, letters = token.lower().split("_")
    if not set(letters) <= set(_ALPHABET):
        return False
    values = [_ALPHABET.index(letter) for letter in letters]
    return values[-1] == _check(kind, values[:-1])


class WrittenToken(NamedTuple):
    """A token in a text: its position, and its spelling in lower case."""

    start: int
    end: int
    token: str


def tokens_in(text: str) -> Iterator[WrittenToken]:
    """Yield what is written like a token, in any case of letters."""
    for match in TOKEN.finditer(text):
        start = match.start()
        if not _is_glued(text, start):
            yield WrittenToken(start, match.end(), match[0].lower())


def _is_glued(text: str, start: int) -> bool:
    """Tell whether a token is a part of a longer word."""
    before = text[start - 1 : start]
    if not (before.isascii() and before.isalnum()):
        return False
    return not _ESCAPE.search(text, max(0, start - _LONGEST_ESCAPE), start)

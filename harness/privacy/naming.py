"""Naming: which token a value gets where it is found.

A value that came from the host has one token in its scope, so that programs may compare. If a program's
own text got the same tokens, the program could check any guess against the value behind a token. So
text of programs gets other tokens for the same values.

Tokens: the words that stand for values, such as `pii_email_7k2q9d3f`.

A token is an identifier in every language of a cell, and survives code, JSON, CSV and markdown. It is a
keyed hash of scope, kind and value, so it is the same each time and cannot be guessed; its last
character checks the others, so that a damaged token is distinguished from an unknown one.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .checked_numbers import luhn_of
from .detector import FoundValue

_MARK = "\0"  # in a normal form: marks a token that is not compared with the host's values


def is_linked(normal: str) -> bool:
    """Tell whether a normal form belongs to a value with the scope's own token."""
    return _MARK not in normal


def plain_normal(normal: str) -> str:
    """Return the normal form of a value, whatever token it got."""
    return normal.partition(_MARK)[0]


class Naming:
    """The naming of values that come from the host: tools, inputs and files."""

    def spares(self, found: FoundValue) -> bool:
        """Tell whether a secret, or a value that is found by its words alone, stays as it is."""
        return False

    def normal(self, normal: str) -> str:
        """Return the normal form by which a value gets its token."""
        return normal


class _NamingOfPrograms(Naming):
    """The naming of values in text of programs: one token for a value, different from the host's."""

    def normal(self, normal: str) -> str:
        return f"{plain_normal(normal)}{_MARK}written"


HOST, PROGRAM = Naming(), _NamingOfPrograms()


class WrittenValues(NamedTuple):
    """The values that a program wrote into the arguments of a call.

    `has_guesses`: there are values that a detector finds, whether or not they are known.  `words`: kind
    and normal form of secrets, and of values that are known.
    """

    has_guesses: bool
    words: frozenset[tuple[str, str]]


class CallNaming(Naming):
    """The naming of values in the result, or in the error, of one call.

    If the program wrote values into the call, each value in the answer gets its own token, so that the
    answer does not reveal which values are equal. Known names that it wrote stay as it wrote them:
    another name would stay, too. `look` returns the program's text; it is called if a value is found.
    """

    def __init__(self, look: Callable[[], WrittenValues]) -> None:
        self._look = look
        self._written: WrittenValues | None = None

    @property
    def written(self) -> WrittenValues:
        if self._written is None:
            self._written = self._look()
        return self._written

    def spares(self, found: FoundValue) -> bool:
        return (found.kind, found.normal) in self.written.words

    def normal(self, normal: str) -> str:
        return f"{normal}{_MARK}{os.urandom(8).hex()}" if self.written.has_guesses else normal


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no letter looks like a digit
_CHARACTERS = 7  # 35 bits; if a token is taken, the vault draws another one
TOKEN = re.compile(
    r"pii_([a-z][a-z0-9]{1,15})_([0-9a-z]{8})(?![A-Za-z0-9_])", re.IGNORECASE
)  # fmt: skip
# The end of an escape, whose letters a token may follow (known_values.py).
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
    """Yield the words in the form of a token, in any case of letters."""
    for match in TOKEN.finditer(text):
        start = match.start()
        if not _is_glued(text, start):
            yield WrittenToken(start, match.end(), match[0].lower())


def _is_glued(text: str, start: int) -> bool:
    before = text[start - 1 : start]
    if not (before.isascii() and before.isalnum()):
        return False
    return not _ESCAPE.search(text, max(0, start - _LONGEST_ESCAPE), start)

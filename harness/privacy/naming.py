"""Naming: which token a value gets where it is found.

A value that came from the host has one token in its scope, so that programs may compare.  If what a
program wrote got the same tokens, it could ask of any guess whether it equals the value behind a token.
So what programs wrote gets other tokens, for the same values.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from .detector import FoundValue

_MARK = "\0"  # in a normal form: of a token that is not compared with those of the host's values


def is_linked(normal: str) -> bool:
    """Tell whether a normal form is that of a value with the scope's own token."""
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
    """The naming of what programs wrote: one token for a value, which is not that of the host's."""

    def normal(self, normal: str) -> str:
        return f"{plain_normal(normal)}{_MARK}written"


HOST, PROGRAM = Naming(), _NamingOfPrograms()


class WrittenValues(NamedTuple):
    """What a program wrote into the arguments of a call.

    `has_guesses`: there are values that a detector finds, whether or not they are known.  `words`: kind
    and normal form of secrets, and of values that are known.
    """

    has_guesses: bool
    words: frozenset[tuple[str, str]]


class CallNaming(Naming):
    """The naming of values in the result, or in the error, of one call.

    If the program wrote values into the call, each value in the answer gets a token of its own, so the
    answer says nothing of which are equal.  Known names that it wrote stay as it wrote them: another
    name would stay, too.  `look` returns what the program wrote; it is called if a value is found.
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

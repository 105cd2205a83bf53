"""`ValueVault`: the values behind tokens, on the host alone, in memory.

Values expire, and can be forgotten.  `ValueFile` (value_file.py) also keeps them in a file.
"""

import hashlib
import hmac
import os
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...policies.errors import PolicyError
from .known_values import KnownValue
from .naming import is_linked, plain_normal
from .tokens import make_token

MONTH_SECONDS = 30 * 86_400.0
MOST_VALUES = 1_000_000
_KEY_BYTES = 32


class StoredValue(NamedTuple):
    """A value with its token; `until` is when it expires, in seconds since the epoch."""

    scope: str
    token: str
    value: KnownValue
    until: float


class ValueVault:
    """Values by scope and token.  Safe from many threads.

    `key`: at least 32 bytes, from which tokens are made; by default random, so that tokens mean nothing
    to another vault.  `keep_seconds`: how long a value is kept after it was last found.  `most`: values
    at most; with more, nothing new is given a token, and what holds it is withheld.
    """

    def __init__(
        self, key: bytes | None = None, *, keep_seconds: float = MONTH_SECONDS,
        most: int = MOST_VALUES, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if key is not None and len(key) < _KEY_BYTES:
            raise PolicyError(f"key: must have at least {_KEY_BYTES} bytes, got {len(key)}")
        self._key = key or os.urandom(_KEY_BYTES)
        self._keep_seconds = keep_seconds
        self._most = most
        self._clock = clock
        self._lock = threading.RLock()
        self._stored: dict[tuple[str, str], StoredValue] = {}
        self._tokens: dict[tuple[str, str, str], str] = {}  # scope, kind, normal form
        self._of_scopes: Counter[str] = Counter()
        self._revision = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._stored)} values)"

    @property
    def revision(self) -> int:
        """A number that grows when values are forgotten or expire, or come from elsewhere."""
        self._refresh()
        return self._revision

    def subkey(self, purpose: str) -> bytes:
        """Return a key for one purpose, made of the vault's own (HMAC-SHA256 as a KDF, SP 800-108)."""
        return hmac.digest(self._key, f"cellwright privacy {purpose}".encode(), hashlib.sha256)

    def tokens_for(self, scope: str, values: Iterable[KnownValue]) -> list[str]:
        """Return the token of each value, and keep the new values.

        Raises PolicyError if the vault is full.
        """
        until = self._clock() + self._keep_seconds
        with self._lock:
            self._refresh()
            kept = [self._kept(scope, value, until) for value in values]
            self._write([each for each, is_new in kept if is_new])
        return [each.token for each, _ in kept]

    def _kept(self, scope: str, value: KnownValue, until: float) -> tuple[StoredValue, bool]:
        name = scope, value.kind, value.normal
        token = self._tokens.get(name) or self._free_token(*name)
        stored = self._stored.get((scope, token))
        if stored and until - stored.until < self._keep_seconds / 100:
            return stored, False
        if stored is None:
            self._make_room(scope)
        stored = StoredValue(scope, token, stored.value if stored else value, until)
        self._put(stored)
        return stored, True

    def _make_room(self, scope: str) -> None:
        """Raise PolicyError if no value of a scope can be added: some room is left for other scopes.

        Tokens of single calls, of which each call makes new ones, are dropped first.
        """
        for drop in (self.expire, lambda: self._drop_oldest_of_programs(scope)):
            if not self._is_full(scope):
                return
            drop()
        if self._is_full(scope):
            raise PolicyError(
                f"the vault of personal data is full: {self._most} values, three quarters of one "
                "session or client"
            )

    def _is_full(self, scope: str) -> bool:
        most_of_scope = max(1, self._most * 3 // 4)
        return len(self._stored) >= self._most or self._of_scopes[scope] >= most_of_scope

    def _drop_oldest_of_programs(self, scope: str) -> None:
        """Erase the older half of the tokens that stand for what programs wrote."""
        written = [
            each for each in self._stored.values()
            if each.scope == scope and not is_linked(each.value.normal)
        ]  # fmt: skip
        oldest = written[: (len(written) + 1) // 2]
        self._delete(oldest)
        self._drop(oldest)

    def _free_token(self, scope: str, kind: str, normal: str) -> str:
        key, attempt = self.subkey("tokens"), 0
        while True:
            token = make_token(key, scope, kind, normal, attempt)
            if self.value_of(scope, token) is None:
                return token
            attempt += 1

    def _put(self, stored: StoredValue) -> None:
        self._of_scopes[stored.scope] += (stored.scope, stored.token) not in self._stored
        self._stored[stored.scope, stored.token] = stored
        self._tokens[stored.scope, stored.value.kind, stored.value.normal] = stored.token

    def value_of(self, scope: str, token: str) -> KnownValue | None:
        """Return the value of a token in lower case; None if it is unknown, or has expired."""
        with self._lock:
            self._refresh()
            stored = self._stored.get((scope, token))
        return stored.value if stored and stored.until > self._clock() else None

    def known(self, scope: str) -> Iterator[KnownValue]:
        """Yield the values of a scope that came from the host."""
        now = self._clock()
        with self._lock:
            stored = list(self._stored.values())
        return (
            each.value for each in stored
            if each.scope == scope and each.until > now and is_linked(each.value.normal)
        )  # fmt: skip

    def copy_scope(self, source: str, target: str) -> None:
        """Give a new scope the values of another one, under the same tokens.

        Raises PolicyError if the vault has no room for them.
        """
        now = self._clock()
        with self._lock:
            self._refresh()
            copies = [
                each._replace(scope=target) for each in self._stored.values()
                if each.scope == source and each.until > now
            ]  # fmt: skip
            if len(self._stored) + len(copies) > self._most:
                raise PolicyError(f"the vault of personal data is full: {self._most} values")
            self._write(copies)
            for each in copies:
                self._put(each)
            self._revision += 1

    def forget(self, value: str | None = None, *, scope: str | None = None) -> int:
        """Erase a value, in whatever form it is written, or a whole scope, or all; return how many."""
        wanted = None if value is None else {value, plain_form(value)}
        return self._erase(
            lambda each: (
                (scope is None or each.scope == scope)
                and (wanted is None or bool(wanted & _forms(each.value)))
            )
        )

    def expire(self) -> int:
        """Erase the values whose time is over; return how many."""
        now = self._clock()
        return self._erase(lambda each: each.until <= now)

    def _erase(self, is_meant: Callable[[StoredValue], bool]) -> int:
        with self._lock:
            self._refresh()
            erased = [each for each in self._stored.values() if is_meant(each)]
            self._delete(erased)
            self._drop(erased)
            self._revision += bool(erased)
        return len(erased)

    def _drop(self, dropped: Iterable[StoredValue]) -> None:
        for each in dropped:
            del self._stored[each.scope, each.token]
            self._of_scopes[each.scope] -= 1
            self._tokens.pop((each.scope, each.value.kind, each.value.normal), None)

    def close(self) -> None:
        """Drop all values from memory."""
        with self._lock:
            self._stored.clear()
            self._of_scopes.clear()
            self._tokens.clear()

    # what a vault with a file does besides

    def _refresh(self) -> None:
        """Take over what other processes changed."""

    def _write(self, stored: list[StoredValue]) -> None:
        """Keep values beyond this process."""

    def _delete(self, stored: list[StoredValue]) -> None:
        """Erase kept values."""


def plain_form(text: str) -> str:
    """Return the letters and digits of a text, without regard to case and spelling."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def _forms(value: KnownValue) -> set[str]:
    normal = plain_normal(value.normal)
    return {value.text, normal, plain_form(value.text), plain_form(normal)}

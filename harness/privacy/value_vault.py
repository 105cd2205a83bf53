"""`ValueVault`: the values behind tokens, on the host alone, in memory.  Values expire, and can be
forgotten.

`ValueFile`: a vault in a SQLite file, encrypted with AES-256-GCM.  The file tells how many values
there are, when they expire, and their scopes and tokens; kinds and values are encrypted, each bound to
its scope and token.  Needs the extra `privacy`.
"""

import hashlib
import hmac
import json
import os
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...policies.errors import PolicyError
from ..database import Database
from ..user_data import Cipher, SecretSource, WrongKey, key_of
from .known_values import KnownValue
from .naming import is_linked, make_token, plain_normal

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
    to another vault. `keep_seconds`: how long a value is kept after it was last found. `most`: largest
    number of values. Beyond it new values get no token, and text that holds them is withheld.
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

    # additions of a vault with a file

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


_VERSION = 1
# AUTOINCREMENT never uses a number again, so that each process knows which rows it has not read.
_SCHEMA = """
CREATE TABLE stored (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL, token TEXT NOT NULL, until REAL NOT NULL, sealed BLOB NOT NULL,
    UNIQUE (scope, token)
)
"""


class ValueFile(ValueVault):
    """A vault that outlives the process. Several processes may use one file at a time: values that one
    erases, the others forget too.

    `key`: a secret text of at least 32 characters, or its source, such as `from_keyring("cellwright",
    "privacy")`, `from_file(path)` or `from_environment("NAME")`. Raises PolicyError without the extra
    `privacy`, for a missing or wrong key; RegistryError for a file that cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], key: str | SecretSource, *,
        keep_seconds: float = MONTH_SECONDS, most: int = MOST_VALUES,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        super().__init__(key_of(key), keep_seconds=keep_seconds, most=most, clock=clock)
        self._cipher = Cipher(self.subkey("encryption"), "vault: a vault in a file")
        self._file = Database(path, "vault of personal data", _VERSION, _SCHEMA)
        self._is_open = True
        self._version = -1  # SQLite's count of changes by other connections
        self._read_to = 0  # number of the newest row read
        try:
            with self._file.writing("expire values of") as db:
                db.execute("PRAGMA secure_delete = ON")  # overwrites replaced rows too
                db.execute("DELETE FROM stored WHERE until <= ?", (self._clock(),))
            self._refresh()
        except BaseException:
            self._file.close()
            raise

    def _refresh(self) -> None:
        """Read the values that other processes added, and drop erased ones."""
        if not self._is_open:
            return
        with self._lock, self._file.reading() as db:
            (version,) = db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return
            (rows,) = db.execute("SELECT count(*) FROM stored").fetchone()
            if rows > self._most:
                raise PolicyError(f"{self._file.path}: more than {self._most} values")
            query = "SELECT number, scope, token, until, sealed FROM stored WHERE number > ?"
            for number, *row in db.execute(f"{query} ORDER BY number", (self._read_to,)).fetchall():
                self._put(self._opened(*row))
                self._read_to = number
            self._version = version
            self._revision += 1
            if rows != len(self._stored):
                kept = set(db.execute("SELECT scope, token FROM stored").fetchall())
                self._drop([each for key, each in self._stored.items() if key not in kept])

    def _opened(self, scope: object, token: object, until: object, sealed: object) -> StoredValue:
        try:
            if not (isinstance(scope, str) and isinstance(token, str) and isinstance(until, float)
                    and isinstance(sealed, bytes)):  # fmt: skip
                raise WrongKey
            text = self._cipher.open(sealed, _bound(scope, token))
        except WrongKey:
            raise PolicyError(
                f"key: does not open the vault of personal data in {self._file.path}",
                "it was made with another key, or was changed",
            ) from None
        return StoredValue(scope, token, KnownValue(*json.loads(text)), until)

    def _write(self, stored: list[StoredValue]) -> None:
        if not stored:
            return
        rows = [(each.scope, each.token, each.until, self._sealed(each)) for each in stored]
        with self._file.writing("write") as db:
            db.executemany(
                "INSERT OR REPLACE INTO stored (scope, token, until, sealed) VALUES (?, ?, ?, ?)",
                rows,
            )

    def _sealed(self, stored: StoredValue) -> bytes:
        text = json.dumps(stored.value).encode()  # not msgspec, which refuses lone surrogates
        return self._cipher.seal(text, _bound(stored.scope, stored.token))

    def _delete(self, stored: list[StoredValue]) -> None:
        """Erase values, also from free pages of the file and from its log."""
        if not stored:
            return
        rows = [(each.scope, each.token) for each in stored]
        with self._file.writing("erase values of") as db:
            db.executemany("DELETE FROM stored WHERE scope = ? AND token = ?", rows)
        with self._file.reading("erase values of") as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._is_open = False
        super().close()
        self._file.close()


def _bound(scope: str, token: str) -> bytes:
    return f"{scope}\0{token}".encode("utf-8", "surrogatepass")

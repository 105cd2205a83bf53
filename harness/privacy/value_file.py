"""`ValueFile`: a vault of values in a SQLite file, encrypted with AES-256-GCM.

The file tells how many values there are, when they expire, and their scopes and tokens; kinds and
values are encrypted, each bound to its scope and token.  Needs the extra `privacy`.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from ...policies.errors import PolicyError
from ..database import Database
from ..sources import SecretSource
from .known_values import KnownValue
from .values import MONTH_SECONDS, StoredValue, ValueVault

_VERSION = 1
_SCHEMA = """
CREATE TABLE stored (
    scope TEXT NOT NULL, token TEXT NOT NULL, until REAL NOT NULL, sealed BLOB NOT NULL,
    PRIMARY KEY (scope, token)
) WITHOUT ROWID
"""
_NONCE_BYTES = 12  # as SP 800-38D recommends
_SHORTEST_KEY = 32  # characters


class ValueFile(ValueVault):
    """A vault that outlives the process.

    `key`: a text of at least 32 characters that nobody can guess, or a source of it, such as
    `from_keyring("cellwright", "privacy")`, `from_file(path)` or `from_environment("NAME")`.  Raises
    PolicyError without the extra `privacy`, for a missing or wrong key; RegistryError for a file that
    cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], key: str | SecretSource, *,
        keep_seconds: float = MONTH_SECONDS, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        super().__init__(_key_of(key), keep_seconds=keep_seconds, clock=clock)
        self._cipher = _cipher(self.subkey("encryption"))
        self._file = Database(path, "vault of personal data", _VERSION, _SCHEMA)
        try:
            self._load()
        except BaseException:
            self._file.close()
            raise

    def _load(self) -> None:
        with self._file.writing("expire values of") as db:
            db.execute("DELETE FROM stored WHERE until <= ?", (self._clock(),))
            rows = db.execute("SELECT scope, token, until, sealed FROM stored").fetchall()
        for row in rows:
            self._put(self._opened(*row))

    def _opened(self, scope: str, token: str, until: float, sealed: bytes) -> StoredValue:
        from cryptography.exceptions import InvalidTag

        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            text = self._cipher.decrypt(nonce, data, _bound(scope, token))
        except InvalidTag:
            raise PolicyError(
                f"key: does not open the vault of personal data in {self._file.path}",
                "it was made with another key, or was changed",
            ) from None
        return StoredValue(scope, token, KnownValue(*json.loads(text)), until)

    def _read(self, scope: str, token: str) -> StoredValue | None:
        """Return a value that another process has added."""
        query = "SELECT until, sealed FROM stored WHERE scope = ? AND token = ?"
        with self._file.reading() as db:
            row = db.execute(query, (scope, token)).fetchone()
        if row is None:
            return None
        stored = self._opened(scope, token, *row)
        self._put(stored)
        return stored

    def _write(self, stored: list[StoredValue]) -> None:
        if not stored:
            return
        rows = [(each.scope, each.token, each.until, self._sealed(each)) for each in stored]
        with self._file.writing("write") as db:
            db.executemany("INSERT OR REPLACE INTO stored VALUES (?, ?, ?, ?)", rows)

    def _sealed(self, stored: StoredValue) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        text = json.dumps(stored.value).encode()  # msgspec refuses what is no Unicode
        sealed: bytes = self._cipher.encrypt(nonce, text, _bound(stored.scope, stored.token))
        return nonce + sealed

    def _delete(self, stored: list[StoredValue]) -> None:
        """Erase values, and what the file and its log still have of them."""
        if not stored:
            return
        rows = [(each.scope, each.token) for each in stored]
        with self._file.writing("erase values of") as db:
            db.execute("PRAGMA secure_delete = ON")
            db.executemany("DELETE FROM stored WHERE scope = ? AND token = ?", rows)
        with self._file.reading("erase values of") as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        super().close()
        self._file.close()


def _bound(scope: str, token: str) -> bytes:
    return f"{scope}\0{token}".encode("utf-8", "surrogatepass")


def _key_of(given: str | SecretSource) -> bytes:
    """Return the key; raises PolicyError, without it, if it is missing or too short."""
    try:
        text = given if isinstance(given, str) else given()
    except Exception as error:  # noqa: BLE001 - a source may raise anything
        raise PolicyError(f"key: cannot be read: {type(error).__name__}") from None
    if len(text) < _SHORTEST_KEY:
        raise PolicyError(
            f"key: must have at least {_SHORTEST_KEY} characters, got {len(text)}",
            "python3 -c 'import secrets; print(secrets.token_hex(32))' makes one",
        )
    return text.encode()


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise PolicyError(
            "vault: a vault in a file needs the extra `privacy`",
            "pip install 'cellwright[privacy]'",
        ) from None
    return AESGCM(key)

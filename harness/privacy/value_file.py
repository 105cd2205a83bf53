"""`ValueFile`: a vault of values in a SQLite file, encrypted with AES-256-GCM.

The file tells how many values there are, when they expire, and their scopes and tokens; kinds and
values are encrypted, each bound to its scope and token.  Needs the extra `privacy`.
"""

import json
import os
import time
from collections.abc import Callable

from ...policies.errors import PolicyError
from ..database import Database
from ..encryption import Cipher, WrongKey, key_of
from ..sources import SecretSource
from .known_values import KnownValue
from .values import MONTH_SECONDS, MOST_VALUES, StoredValue, ValueVault

_VERSION = 1
# Numbers are never used again, so that each process knows which rows it has not read yet.
_SCHEMA = """
CREATE TABLE stored (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL, token TEXT NOT NULL, until REAL NOT NULL, sealed BLOB NOT NULL,
    UNIQUE (scope, token)
)
"""


class ValueFile(ValueVault):
    """A vault that outlives the process.  Several processes may use one file at a time: what one
    of them erases, the others forget too.

    `key`: a text of at least 32 characters that nobody can guess, or a source of it, such as
    `from_keyring("cellwright", "privacy")`, `from_file(path)` or `from_environment("NAME")`.  Raises
    PolicyError without the extra `privacy`, for a missing or wrong key; RegistryError for a file that
    cannot be read.
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
        self._version = -1  # of the file, as SQLite counts what other connections write
        self._read_to = 0  # the number of the newest row that was read
        try:
            with self._file.writing("expire values of") as db:
                db.execute("PRAGMA secure_delete = ON")  # also of rows that are replaced
                db.execute("DELETE FROM stored WHERE until <= ?", (self._clock(),))
            self._refresh()
        except BaseException:
            self._file.close()
            raise

    def _refresh(self) -> None:
        """Read what other processes added, and drop what they erased."""
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
        text = json.dumps(stored.value).encode()  # msgspec refuses what is no Unicode
        return self._cipher.seal(text, _bound(stored.scope, stored.token))

    def _delete(self, stored: list[StoredValue]) -> None:
        """Erase values, and what the file and its log still have of them."""
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

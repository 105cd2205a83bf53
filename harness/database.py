"""A SQLite file of ours: made privately, written in whole transactions, never taken for another's.

Killed at any point, a write happened or it did not (WAL, synchronous=FULL).  Several processes may use
one file at a time.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ..policies.errors import RegistryError

MEMORY = ":memory:"
_APPLICATION = 0x63656C6C  # in the header of the file (PRAGMA application_id)
_BUSY_SECONDS = 10.0  # that a write of another process is waited for


class Database:
    """An open file.  Safe from many threads; not across a fork."""

    def __init__(
        self, path: str | None, what: str, version: int, schema: str, *,
        upgrades: Mapping[int, str] = MappingProxyType({}), must_exist: bool = False,
    ) -> None:  # fmt: skip
        """Open or make the file at `path`, or one in memory, for `what`, a word for messages.

        `upgrades` maps an older version to the statements that make it `version`.  Raises
        RegistryError for a file that cannot be opened or holds something else, and with `must_exist`
        for one that is missing.
        """
        self.path = path or MEMORY
        self._what = what
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        with self._explained("open"):
            if path:
                if must_exist and os.stat(path).st_size == 0:
                    raise RegistryError(f"{path} holds no {what}: it is empty")
                _make_private(path)
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(version, schema, upgrades)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, version: int, schema: str, upgrades: Mapping[int, str]) -> None:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "journal_mode = WAL",
                       "synchronous = FULL", "foreign_keys = ON"):  # fmt: skip
            self._db.execute(f"PRAGMA {pragma}")
        with self.writing("prepare") as db:
            found = [db.execute(f"PRAGMA {name}").fetchone()[0]
                     for name in ("application_id", "user_version")]  # fmt: skip
            if found == [0, 0] and not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                _execute_all(db, schema, version)
            elif found[0] == _APPLICATION and found[1] in upgrades:
                _execute_all(db, upgrades[found[1]], version)
            elif found != [_APPLICATION, version]:
                raise RegistryError(
                    f"{self.path} holds no {self._what}: it is another program's, or another version's"
                )

    @contextlib.contextmanager
    def reading(self, purpose: str = "read") -> Iterator[sqlite3.Connection]:
        """Keep others of this process out, and tell what goes wrong as RegistryError."""
        if os.getpid() != self._owner:  # before the lock: another thread may have held it
            raise RegistryError(f"the {self._what} in {self.path} was opened before the fork")
        with self._explained(purpose), self._lock:
            if self._closed:
                raise RegistryError(f"the {self._what} in {self.path} was closed")
            yield self._db

    @contextlib.contextmanager
    def writing(self, purpose: str) -> Iterator[sqlite3.Connection]:
        """Make what is done within one transaction; an exception undoes it."""
        with self.reading(purpose) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._db.close()

    @contextlib.contextmanager
    def _explained(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise RegistryError(
                f"cannot {purpose} the {self._what} in {self.path}: {error}"
            ) from None


def _execute_all(db: sqlite3.Connection, statements: str, version: int) -> None:
    for statement in statements.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {version}")


def _make_private(path: str) -> None:
    """Make a missing file readable by its owner alone, where SQLite asks umask(2); follow no link."""
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    os.close(os.open(path, flags, 0o600))

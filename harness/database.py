"""`Database`: a private SQLite file with a format number, written in whole transactions.

A write is on disk completely or not at all, even if the process is killed (WAL, synchronous=FULL).
Several processes may use one file at a time.  A file of another program or format is refused.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ..policies.errors import CellwrightError, RegistryError

MEMORY = ":memory:"
_APPLICATION = 0x63656C6C  # identifies the file in its header (PRAGMA application_id)
_BUSY_SECONDS = 10.0  # how long a write waits for the write of another process


class Database:
    """An open file.  Safe from many threads; not across a fork."""

    def __init__(
        self, path: str | os.PathLike[str] | None, what: str, version: int, schema: str, *,
        upgrades: Mapping[int, str] = MappingProxyType({}), unmarked: str = "",
        must_exist: bool = False, error: type[CellwrightError] = RegistryError,
    ) -> None:  # fmt: skip
        """Open or make the file at `path`, or one in memory; `what` names it in error messages.

        `upgrades` maps an older format number to the statements that lead to `version`.  `unmarked`
        names the table of files from before they had a number: a file with that table alone is
        adopted.  Raises `error`, here and in each method, for a file that cannot be opened or holds
        something else, and with `must_exist` for one that is missing.
        """
        self.path = os.fspath(path) if path else MEMORY
        self._error = error
        self._what = what
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        with self._explained("open"):
            if path:
                if must_exist and os.stat(path).st_size == 0:
                    raise error(f"{path} holds no {what}: it is empty")
                _make_private(self.path)
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(version, schema, upgrades, unmarked)
            except BaseException:
                self._db.close()
                raise

    def _prepare(
        self, version: int, schema: str, upgrades: Mapping[int, str], unmarked: str
    ) -> None:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "journal_mode = WAL",
                       "synchronous = FULL", "foreign_keys = ON"):  # fmt: skip
            self._db.execute(f"PRAGMA {pragma}")
        with self.writing("prepare") as db:
            found = [db.execute(f"PRAGMA {name}").fetchone()[0]
                     for name in ("application_id", "user_version")]  # fmt: skip
            tables = db.execute("SELECT name FROM sqlite_schema").fetchall()
            if found == [0, 0] and not tables:
                _execute_all(db, schema, version)
            elif found == [0, 0] and tables == [(unmarked,)]:
                _mark(db, version)
            elif found[0] == _APPLICATION and found[1] in upgrades:
                _execute_all(db, upgrades[found[1]], version)
            elif found != [_APPLICATION, version]:
                raise self._error(
                    f"{self.path} holds no {self._what}: it is a file of another program or version"
                )

    @contextlib.contextmanager
    def reading(self, purpose: str = "read") -> Iterator[sqlite3.Connection]:
        """Hold the lock of this process; errors are raised as those of this database."""
        if os.getpid() != self._owner:  # before the lock: another thread may have held it
            raise self._error(f"the {self._what} in {self.path} was opened before the fork")
        with self._explained(purpose), self._lock:
            if self._closed:
                raise self._error(f"the {self._what} in {self.path} was closed")
            yield self._db

    @contextlib.contextmanager
    def writing(self, purpose: str) -> Iterator[sqlite3.Connection]:
        """Execute the block as one transaction; an exception rolls it back."""
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
            raise self._error(
                f"cannot {purpose} the {self._what} in {self.path}: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error


def _execute_all(db: sqlite3.Connection, statements: str, version: int) -> None:
    for statement in statements.split(";"):
        db.execute(statement)
    _mark(db, version)


def _mark(db: sqlite3.Connection, version: int) -> None:
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {version}")


def _make_private(path: str) -> None:
    """Make a missing file, readable by its owner alone (SQLite would use the umask); follow no link."""
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    os.close(os.open(path, flags, 0o600))

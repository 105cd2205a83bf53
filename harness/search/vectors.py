"""What was worked out once, kept in a file by its key."""

import contextlib
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...policies.errors import PolicyError


class Memory:
    """Bytes by keys, in one SQLite file.  Safe from many threads, and the file from many processes."""

    def __init__(self, path: Path) -> None:
        """Raises PolicyError if the file cannot be opened, or made."""
        self._lock = threading.Lock()
        try:
            self._file = sqlite3.connect(path, check_same_thread=False)
            weakref.finalize(self, self._file.close)  # nobody is asked to close it
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB) "
                "WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise PolicyError(f"cannot use {path} to remember vectors: {error}") from error

    def recall(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return what is known of these."""
        ask = "SELECT vector FROM vectors WHERE text = ?"
        with self._lock:
            rows = {key: self._file.execute(ask, (key,)).fetchone() for key in keys}
        return {key: row[0] for key, row in rows.items() if row}

    def keep(self, found: Mapping[bytes, bytes]) -> None:
        """Remember these; what cannot be - no room, another process writes - is worked out again."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError), self._file:
            self._file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", found.items())

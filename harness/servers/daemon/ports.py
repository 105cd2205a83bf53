"""`DaemonsPorts`: the ports of sessions that clients of a daemon have exposed, by key."""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

from ....policies.errors import BusyError
from ...sandbox.ports.exposed import ExposedPort
from ...sandbox.session import Session


class DaemonsPorts:
    """At most `per_session` ports of each session; safe from many threads.

    The end of a session closes its ports.
    """

    def __init__(self, per_session: int) -> None:
        self._per_session = per_session
        self._lock = threading.Lock()
        self._by_key: dict[str, tuple[Session, ExposedPort]] = {}
        self._coming: Counter[int] = Counter()  # by the id of the session

    @contextlib.contextmanager
    def room_for(self, session: Session) -> Iterator[None]:
        """Keep room for one more port during the block; raises BusyError without room."""
        with self._lock:
            self._by_key = {key: each for key, each in self._by_key.items() if not each[0].lost}
            count = sum(owner is session for owner, _ in self._by_key.values())
            if count + self._coming[id(session)] >= self._per_session:
                raise BusyError(f"expose: at most {self._per_session} ports of a session at once")
            self._coming[id(session)] += 1
        try:
            yield
        finally:
            with self._lock:
                self._coming[id(session)] -= 1
                self._coming += Counter()  # drops what is 0

    def add(self, session: Session, exposed: ExposedPort) -> str:
        """Keep an exposed port; return the key that closes it."""
        key = os.urandom(16).hex()
        with self._lock:
            self._by_key[key] = session, exposed
        return key

    def close(self, key: str) -> None:
        """Close a port; harmless if it is closed already."""
        with self._lock:
            _, exposed = self._by_key.pop(key, (None, None))
        if exposed:
            exposed.close()

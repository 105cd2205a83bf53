"""The sessions that clients have open: each its owner's alone, and no more than there is room for."""

import secrets
import threading
from typing import TYPE_CHECKING, NamedTuple

from ....policies.errors import BusyError, CellwrightError, SessionLost
from ....runner.session import SessionSettings
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session

if TYPE_CHECKING:
    from .clients import Owner  # which imports the SDK

_ID_BYTES = 16


class SessionLimits(NamedTuple):
    """How many sessions live, and for how long without being used."""

    of_one: int = 8
    of_all: int = 32
    idle_seconds: float = 1800.0

    @property
    def of_a_client(self) -> int:
        """Return how many there are in all of its conversations: some are left for others."""
        return max(self.of_one, self.of_all * 3 // 4)

    @property
    def settings(self) -> SessionSettings:
        """Return them for a sandbox, which would end the oldest of somebody else where we refuse."""
        return SessionSettings(alive=self.of_all + 1, idle_seconds=self.idle_seconds)


class OwnedSessions:
    """Sessions by owner and id: for others they do not exist.  Safe from many threads."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Session] = {}
        self._opening: dict[str, str] = {}  # id -> its owner: they count already

    def open(self, owner: "Owner", sandbox: Sandbox, language: str) -> Session:
        """Open a session; raises BusyError if its owner, or all together, have too many."""
        id = self._reserve(owner)
        try:
            session = sandbox.session(id, language)
            with self._lock:
                self._open[owner.id, id] = session
            return session
        finally:
            with self._lock:
                del self._opening[id]

    def _reserve(self, owner: "Owner") -> str:
        """Count a session that is about to be opened, and return its id."""
        with self._lock:
            self._forget_the_lost()
            all_owners = [key[0] for key in self._open] + list(self._opening.values())
            clients = [each.partition("/")[0] for each in all_owners]
            if all_owners.count(owner.id) >= self._limits.of_one:
                raise BusyError(f"{self._limits.of_one} sessions are open already", "close one")
            if clients.count(owner.client) >= (most := self._limits.of_a_client):
                raise BusyError(f"{most} sessions of this client are open already", "close one")
            if len(all_owners) >= self._limits.of_all:
                raise BusyError(f"{self._limits.of_all} sessions of all clients are open already")
            id = secrets.token_hex(_ID_BYTES)  # where there is no handshake it is all that is known
            self._opening[id] = owner.id
            return id

    def get(self, owner: "Owner", id: str) -> Session:
        """Return a session of this owner's; raises SessionLost alike if it is another's or nobody's."""
        with self._lock:
            session = self._open.get((owner.id, id))
        if session is None or session.lost:
            why = session.lost if session else "there is none of that id, or it is gone"
            raise SessionLost(f"session {id[:64]!r}: {why}", 'open another with session="new"')
        return session

    def of(self, owner: "Owner") -> list[Session]:
        """Return those that an owner has open, in the order in which they were opened."""
        with self._lock:
            self._forget_the_lost()
            return [session for (whose, _), session in self._open.items() if whose == owner.id]

    def close(self, owner: "Owner", id: str) -> None:
        """End one; raises SessionLost if there is none."""
        self.get(owner, id).close()

    def close_all(self, owner_id: str) -> None:
        """End those of an owner who is gone."""
        with self._lock:
            gone = [key for key in self._open if key[0] == owner_id]
            sessions = [self._open.pop(key) for key in gone]
        for session in sessions:
            try:
                session.close()
            except CellwrightError:
                continue  # its launcher died: all is freed even so

    def _forget_the_lost(self) -> None:
        self._open = {key: session for key, session in self._open.items() if not session.lost}

"""Open sessions of the clients: only its owner can use a session, and their number is limited."""

import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...policies.errors import BusyError, CellwrightError, SessionLost
from ...runner.settings import SessionSettings
from ..sandbox.sandbox import Sandbox
from ..sandbox.session import Session
from .client_quota import ClientQuota

_ID_BYTES = 16


class SessionLimits(NamedTuple):
    """The number of open sessions, and the seconds that one may be idle."""

    of_one: int = 8
    of_all: int = 32
    idle_seconds: float = 1800.0

    @property
    def of_a_client(self) -> int:
        """Return the limit of one client over all its conversations; some are left for other
        clients."""
        return max(self.of_one, self.of_all * 3 // 4)

    @property
    def settings(self) -> SessionSettings:
        """Return the settings for a sandbox.  It allows one more than we do: at its own limit it would
        end another client's oldest session instead of refusing."""
        return SessionSettings(alive=self.of_all + 1, idle_seconds=self.idle_seconds)


class SessionOwner(Protocol):
    """The owner of sessions; `id` begins with the name of its client (see `client_of`)."""

    @property
    def id(self) -> str: ...


class OwnedSessions:
    """Sessions by owner and id; to other owners a session does not exist.  Safe from many threads."""

    def __init__(self, limits: SessionLimits) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Session] = {}  # by owner and id
        hint, total = "close one", limits.of_all
        self._of_owners = ClientQuota("open sessions", limits.of_one, total, hint, "conversation")
        self._of_clients = ClientQuota("open sessions", limits.of_a_client, total, hint)

    def open(
        self, owner: SessionOwner, sandbox: Sandbox, language: str, packages: Sequence[str] = ()
    ) -> Session:
        """Open a session; raises BusyError if its owner, its client or all together have too many."""
        self._count(owner.id)
        try:
            id = secrets.token_hex(_ID_BYTES)  # without a handshake, the id is the only credential
            session = sandbox.session(id, language, packages=packages)
        except BaseException:
            self._uncount(owner.id)
            raise
        with self._lock:
            self._open[owner.id, id] = session
        return session

    def named(
        self, owner: SessionOwner, name: str, sandbox: Sandbox, language: str,
        packages: Sequence[str] = (),
    ) -> Session:  # fmt: skip
        """Return the owner's session of a name that the owner chose, or open it."""
        with self._lock:
            known = self._open.get((owner.id, name))
        is_new = known is None or bool(known.lost)
        if is_new:
            self._count(owner.id)
        try:
            session = sandbox.session(name, language, packages=packages)
        except BaseException:
            if is_new:
                self._uncount(owner.id)
            raise
        try:
            self._keep(owner.id, name, session, is_counted=is_new)
        except BusyError:
            session.close()
            raise
        return session

    def _keep(self, owner_id: str, name: str, session: Session, *, is_counted: bool) -> None:
        """Note an open session; each place counts once, whatever other threads did meanwhile."""
        with self._lock:
            has_place = (owner_id, name) in self._open
            if is_counted and has_place:  # another thread was first
                self._uncount(owner_id)
            elif not is_counted and not has_place:  # the known one ended, and was forgotten
                self._take(owner_id)
            self._open[owner_id, name] = session

    def _count(self, owner_id: str) -> None:
        with self._lock:
            self._forget_the_lost()
        self._take(owner_id)

    def _take(self, owner_id: str) -> None:
        self._of_owners.take(owner_id)
        try:
            self._of_clients.take(client_of(owner_id))
        except BusyError:
            self._of_owners.give_back(owner_id)
            raise

    def _uncount(self, owner_id: str) -> None:
        self._of_clients.give_back(client_of(owner_id))
        self._of_owners.give_back(owner_id)

    def get(self, owner: SessionOwner, id: str) -> Session:
        """Return a session of this owner; raises the same SessionLost for another owner's as for an
        unknown one."""
        with self._lock:
            session = self._open.get((owner.id, id))
        if session is None or session.lost:
            why = session.lost if session else "not found, or it has ended"
            raise SessionLost(f"session {id[:64]!r}: {why}", 'open a new one with session="new"')
        return session

    def of(self, owner: SessionOwner) -> list[Session]:
        """Return an owner's open sessions, oldest first."""
        with self._lock:
            self._forget_the_lost()
            return [session for (whose, _), session in self._open.items() if whose == owner.id]

    def close(self, owner: SessionOwner, id: str) -> None:
        """End a session; raises SessionLost if it does not exist."""
        self.get(owner, id).close()

    def close_all(self, owner_id: str) -> None:
        """End all sessions of an owner whose conversation has ended."""
        with self._lock:
            gone = [key for key in self._open if key[0] == owner_id]
            sessions = [self._forget(key) for key in gone]
        for session in sessions:
            try:
                session.close()
            except CellwrightError:
                continue  # its launcher died, which frees the session as well

    def _forget_the_lost(self) -> None:
        for key in [key for key, session in self._open.items() if session.lost]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> Session:
        self._uncount(key[0])
        return self._open.pop(key)


def client_of(owner_id: str) -> str:
    """Return the client's name in an owner's id (see `clients.owner_id`)."""
    return owner_id.partition("/")[0]

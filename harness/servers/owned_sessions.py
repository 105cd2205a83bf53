"""Sessions of the clients, open and paused: only its owner can use a session, and their number is
limited."""

import contextlib
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...policies.errors import BusyError, CellwrightError, SessionLost
from ...runner.settings import PauseSettings, SessionSettings
from ..sandbox.sandbox import Sandbox
from ..sandbox.session import Session
from .client_quota import ClientQuota

_ID_BYTES = 16
_PAUSED_BYTES = 5 << 29  # of one client: a quarter of those of all clients and other callers


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

    @property
    def pauses(self) -> PauseSettings:
        """Return the settings of paused sessions.  Clients have no tokens, so the states are of no use
        to another process."""
        return PauseSettings(sandbox_bytes=_PAUSED_BYTES, is_private=True)


class SessionOwner(Protocol):
    """The owner of sessions; `id` begins with the name of its client (see `client_of`)."""

    @property
    def id(self) -> str: ...


class _PausedSession:
    """A session without a cell.  Its token stays here: a client names the session by its id."""

    def __init__(self, sandbox: Sandbox, language: str) -> None:
        self.sandbox = sandbox
        self.language = language
        self.token = ""  # until it is paused
        self.turn = threading.Lock()  # held while the session is paused, resumed or discarded


class ListedSession(NamedTuple):
    """A session as its owner sees it in a list."""

    id: str
    language: str
    is_paused: bool


class OwnedSessions:
    """Sessions by owner and id; to other owners a session does not exist.  Safe from many threads.

    A paused session is resumed by its next use, if its owner may have one more open session.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Session] = {}  # by owner and id
        hint, total = "close one", limits.of_all
        self._of_owners = ClientQuota("open sessions", limits.of_one, total, hint, "conversation")
        self._of_clients = ClientQuota("open sessions", limits.of_a_client, total, hint)
        self._paused: dict[tuple[str, str], _PausedSession] = {}
        self._of_pausers = ClientQuota("paused sessions", limits.of_a_client, total, hint)

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

    def _count(self, owner_id: str, amount: int = 1) -> None:
        with self._lock:
            self._forget_the_lost()
        self._take(owner_id, amount)

    def _take(self, owner_id: str, amount: int = 1) -> None:
        self._of_owners.take(owner_id, amount)
        try:
            self._of_clients.take(client_of(owner_id), amount)
        except BusyError:
            self._of_owners.give_back(owner_id, amount)
            raise

    def _uncount(self, owner_id: str, amount: int = 1) -> None:
        self._of_clients.give_back(client_of(owner_id), amount)
        self._of_owners.give_back(owner_id, amount)

    def get(self, owner: SessionOwner, id: str) -> Session:
        """Return a session of this owner, resumed if it was paused; raises the same SessionLost for
        another owner's as for an unknown one, and what resuming raises."""
        with self._lock:
            session, paused = self._open.get((owner.id, id)), self._paused.get((owner.id, id))
        if session is not None and not session.lost:
            return session
        if paused:
            return self._resumed(owner, id, paused)
        raise _not_found(id, session)

    def branch(self, owner: SessionOwner, id: str, n: int) -> tuple[Session, ...]:
        """Open `n` branches of a session; raises BusyError if these are too many for its owner, and
        PolicyError if its memory cannot be copied: no call of a tool is repeated."""
        source = self.get(owner, id)
        self._count(owner.id, n)
        try:
            made = source.branch(n, replay=False)
        except BaseException:
            self._uncount(owner.id, n)
            raise
        with self._lock:
            self._open.update({(owner.id, each.id): each for each in made})
        return made

    def pause(self, owner: SessionOwner, id: str, sandbox: Sandbox) -> None:
        """Keep a session on disk, without a cell; raises PauseError, BusyError, and it stays open."""
        session, key = self.get(owner, id), (owner.id, id)
        self._of_pausers.take(client_of(owner.id))
        paused = _PausedSession(sandbox, session.language)
        with paused.turn:
            with self._lock:
                is_first = self._paused.setdefault(key, paused) is paused
            try:
                if not is_first:
                    raise _not_found(id, session)
                paused.token = session.pause()
            except BaseException:
                self._forget_paused(key, paused)
                raise

    def _resumed(self, owner: SessionOwner, id: str, paused: _PausedSession) -> Session:
        key = owner.id, id
        with paused.turn:
            with self._lock:
                known, is_paused = self._open.get(key), self._paused.get(key) is paused
            if not is_paused:  # another thread resumed or closed it, or it could not be paused
                if known is None or known.lost:
                    raise _not_found(id, known)
                return known
            self._count(owner.id)
            try:
                session = paused.sandbox.resume(paused.token)
            except BaseException:
                self._uncount(owner.id)
                raise
            with self._lock:
                self._open[key] = session
            self._forget_paused(key, paused)
        return session

    def _forget_paused(self, key: tuple[str, str], paused: _PausedSession) -> None:
        with self._lock:
            if self._paused.get(key) is paused:
                del self._paused[key]
        self._of_pausers.give_back(client_of(key[0]))

    def _discard(self, key: tuple[str, str]) -> bool:
        """Remove a paused session; tell whether it was one."""
        with self._lock:
            paused = self._paused.get(key)
        if paused is None:
            return False
        with paused.turn:
            with self._lock:
                if self._paused.get(key) is not paused:
                    return False
            with contextlib.suppress(CellwrightError):  # it has expired
                paused.sandbox.discard(paused.token)
            self._forget_paused(key, paused)
        return True

    def of(self, owner: SessionOwner) -> list[Session]:
        """Return an owner's open sessions, oldest first."""
        with self._lock:
            self._forget_the_lost()
            return [session for (whose, _), session in self._open.items() if whose == owner.id]

    def listed(self, owner: SessionOwner) -> list[ListedSession]:
        """Return an owner's sessions, the open ones first, each kind oldest first."""
        listed = [ListedSession(each.id, each.language, False) for each in self.of(owner)]
        with self._lock:
            paused = [(key, each) for key, each in self._paused.items() if each.token]
        return listed + [
            ListedSession(id, each.language, True)
            for (whose, id), each in paused
            if whose == owner.id
        ]

    def close(self, owner: SessionOwner, id: str) -> None:
        """End a session; raises SessionLost if it does not exist."""
        if not self._discard((owner.id, id)):
            self.get(owner, id).close()

    def close_all(self, owner_id: str) -> None:
        """End all sessions of an owner whose conversation has ended."""
        with self._lock:
            paused = [key for key in self._paused if key[0] == owner_id]
        for key in paused:
            self._discard(key)
        with self._lock:
            gone = [key for key in self._open if key[0] == owner_id]
            sessions = [self._forget(key) for key in gone]
        for session in sessions:
            try:
                session.close()
            except CellwrightError:
                continue  # its launcher died, which frees the session as well

    def discard_paused(self) -> None:
        """Remove all paused sessions: no other server can resume them."""
        with self._lock:
            paused = list(self._paused)
        for key in paused:
            self._discard(key)

    def _forget_the_lost(self) -> None:
        for key in [key for key, session in self._open.items() if session.lost]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> Session:
        self._uncount(key[0])
        return self._open.pop(key)


def _not_found(id: str, session: Session | None) -> SessionLost:
    why = session.lost if session and session.lost else "not found, or it has ended"
    return SessionLost(f"session {id[:64]!r}: {why}", 'open a new one with session="new"')


def client_of(owner_id: str) -> str:
    """Return the client's name in an owner's id (see `clients.owner_id`)."""
    return owner_id.partition("/")[0]

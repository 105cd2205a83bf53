"""`OpenSessions`: the sessions of one sandbox, by id."""

import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from ....policies.errors import PauseError, PolicyError
from ....policies.languages import SPOKEN, language_names
from ....policies.policy import Limits
from ..calls.call_request import Rejected, check_language
from ..packaged import Lease, PackagedCells
from ..parameters import SessionArguments
from .cell_session import CellSession
from .life import SessionLife, SessionServices

if TYPE_CHECKING:
    from ..workspaces.workspace_calls import NamedWorkspace, SessionWorkspace


class OpenSessions:
    """The sessions of one sandbox, by id."""

    def __init__(self, services: SessionServices, packaged: PackagedCells, limits: Limits) -> None:
        """`limits`: of the policy; a set of packages is built within their wall time."""
        self._packaged = packaged
        self._limits = limits
        self._services = services
        self._lock = threading.Lock()
        self._by_id: dict[str, CellSession] = {}

    def open(
        self, given: SessionArguments, wanted: "NamedWorkspace | None" = None, why: str = ""
    ) -> CellSession:
        """Return the session of an id, or a new one; the trail gets `why` it was opened."""
        language = _language(given.language)
        with self._lock:
            if known := self._known(given, wanted, language):
                return known
        # Without blocking other sessions, because the set may have to be built.
        lease = self._packaged.lease(given.packages, language, self._limits.wall_seconds)
        try:
            return self._open_new(given, wanted, language, lease, why)
        except BaseException:
            lease.close()
            raise

    def resume(self, token: str) -> CellSession:
        """Return the session that was paused; raises PauseError."""
        pausing = self._services.pausing()
        with pausing.taken(token) as state:
            session = self._open_anew(state.given, "a paused session is resumed")
            pausing.restore(state, session.cell)
        session.forget_calls()
        return session

    def discard(self, token: str) -> None:
        """Remove the state of a paused session; raises PauseError."""
        self._services.pausing().discard(token)

    def paused(self) -> int:
        """Return how many sessions are paused, of those that come back with their next request."""
        return self._services.idle.paused() if self._services.idle else 0

    def close(self) -> None:
        """Pause no more, and end the sessions: nothing else could resume the paused ones."""
        if self._services.idle:
            self._services.idle.close()
            with self._lock:
                known = list(self._by_id.values())
            for session in known:
                session.end("the sandbox was closed")

    def _open_anew(self, given: SessionArguments, why: str) -> CellSession:
        with self._lock:
            known = self._by_id.get(given.id or "")
        if known and not known.lost:
            raise PauseError(
                f"token: a session of its id lives: {given.id!a}", "close that session"
            )
        return self.open(given, None, why)

    def _known(
        self, given: SessionArguments, wanted: "NamedWorkspace | None", language: str
    ) -> CellSession | None:
        """Return the session of that id if it lives; raises PolicyError if it is of another kind."""
        known = self._by_id.get(given.id or "")
        if known is None or known.lost:
            return None
        known.check_workspace(wanted)
        if known.language != language:
            raise PolicyError(
                f"language: session {given.id!r} runs {known.language}, got {language}"
            )
        if given.packages and tuple(given.packages) != known.packages:
            raise PolicyError(f"packages: session {given.id!r} was opened with others")
        return known

    def _open_new(
        self, given: SessionArguments, wanted: "NamedWorkspace | None", language: str, lease: Lease,
        why: str,
    ) -> CellSession:  # fmt: skip
        given = SessionArguments(
            id=given.id or os.urandom(16).hex(), language=language, packages=tuple(given.packages)
        )
        if wanted:
            return self._open_in(wanted, given, lease)
        if self._services.idle:  # before the lock, because pausing other sessions takes long
            self._services.make_room()
        with self._lock:
            if known := self._known(given, wanted, language):  # another thread has already done it
                lease.close()
                return known
            return self._open(given, lease, why=why)

    def _open_in(
        self, wanted: "NamedWorkspace", given: SessionArguments, lease: Lease
    ) -> CellSession:
        """Open a session with the files of a workspace, without blocking other sessions meanwhile."""
        from ..workspaces.workspace_calls import SessionWorkspace

        id = given.id or ""
        note = partial(self._services.admission.record_workspace, session_id=id)
        kept_in = SessionWorkspace(wanted, note, id)
        try:
            with self._lock:
                session = self._open(given, lease, kept_in)
        except BaseException:
            kept_in.release()
            raise
        try:
            kept_in.lay(session._write)
        except BaseException:
            session.end("the files of its workspace could not be written")
            raise
        return session

    def _open(
        self, given: SessionArguments, lease: Lease, kept_in: "SessionWorkspace | None" = None,
        why: str = "",
    ) -> CellSession:  # fmt: skip
        self._by_id = {key: each for key, each in self._by_id.items() if not each.lost}
        life = SessionLife(self._services, given, lease, kept_in, why)
        alike = SessionArguments(language=given.language, packages=given.packages)
        another = partial(self.open, alike, None)
        self._by_id[life.id] = session = CellSession(life, self._services, another)
        return session


def _language(name: str) -> str:
    try:
        language = check_language(name)
    except Rejected as refusal:
        raise PolicyError(f"language: {refusal}") from None
    if language not in SPOKEN:
        raise PolicyError(
            f"language: there are no sessions in {language}",
            f"execute its programs without a session; those of {', '.join(language_names())} have them",
        )
    return language

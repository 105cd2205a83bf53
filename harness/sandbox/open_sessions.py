"""`OpenSessions`: the sessions of one sandbox, by id."""

import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from ...policies.errors import PauseError, PolicyError
from ...policies.policy import Limits
from ...runner.launcher_claim import LauncherClaim
from ...runner.supervisors import Supervisors
from .packaged import Lease, PackagedCells
from .parameters import SessionArguments
from .pipeline import RequestPipeline
from .ports.exposed import SandboxPorts
from .request import Rejected, check_language
from .returning_cell import LeasedCell

if TYPE_CHECKING:
    from .workspaces.calls import NamedWorkspace, SessionWorkspace


from .sessions import CellSession, SessionServices

_ROOM_SECONDS = 30.0  # until one of as many sessions as may live is idle


class OpenSessions:
    """The sessions of one sandbox, by id."""

    def __init__(
        self, supervisors: Supervisors, pipeline: RequestPipeline, ports: SandboxPorts,
        packaged: PackagedCells, limits: Limits, services: SessionServices,
    ) -> None:  # fmt: skip
        """`limits`: of the policy; a set of packages is built within their wall time."""
        self._supervisors = supervisors
        self._pipeline = pipeline
        self._ports = ports
        self._packaged = packaged
        self._limits = limits
        self._services = services
        self._lock = threading.Lock()
        self._by_id: dict[str, CellSession] = {}

    def open(
        self, given: SessionArguments, wanted: "NamedWorkspace | None" = None, why: str = ""
    ) -> CellSession:
        """Return the session of an id, or a new one, of which the trail says `why` it was opened."""
        language = _language(given.language)
        with self._lock:
            if known := self._known(given, wanted, language):
                return known
        # Without blocking other sessions meanwhile: the set may have to be built.
        lease = self._packaged.lease(given.packages, language, self._limits.wall_seconds)
        try:
            return self._open_new(given, wanted, language, lease, why)
        except BaseException:
            lease.close()
            raise

    def resume(self, token: str) -> CellSession:
        """Return the session that was paused; raises PauseError."""
        session = self._services.pausing().resume(token, self.open_new)
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

    def open_new(self, given: SessionArguments, why: str) -> CellSession:
        """Return a new session; raises PauseError if one of that id lives."""
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
        id = given.id or os.urandom(16).hex()
        if wanted:
            return self._open_in(wanted, id, given, lease)
        if self._services.idle:  # before the lock: sessions that are paused for this one take long
            self._supervisors.make_room(_ROOM_SECONDS)
            self._services.idle.make_room(0)
        with self._lock:
            if known := self._known(given, wanted, language):  # another thread was first
                lease.close()
                return known
            return self._open(id, given, lease, why=why)

    def _open_in(
        self, wanted: "NamedWorkspace", id: str, given: SessionArguments, lease: Lease
    ) -> CellSession:
        """Open a session with the files of a workspace, without blocking other sessions meanwhile."""
        from .workspaces.calls import SessionWorkspace

        kept_in = SessionWorkspace(
            wanted, partial(self._pipeline.record_workspace, session_id=id), id
        )
        try:
            with self._lock:
                session = self._open(id, given, lease, kept_in)
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
        self, id: str, given: SessionArguments, lease: Lease,
        kept_in: "SessionWorkspace | None" = None, why: str = "",
    ) -> CellSession:  # fmt: skip
        self._by_id = {key: each for key, each in self._by_id.items() if not each.lost}
        leased = self._leased(id, tuple(given.packages), lease)
        self._pipeline.record_session(id, "opened", why)
        if kept_in:
            kept_in.attach(leased.cell)
        alike = SessionArguments(language=given.language, packages=given.packages)
        another = partial(self.open, alike, None)
        session = CellSession(
            leased, self._pipeline, self._services, another, self._open_again, kept_in
        )
        self._by_id[id] = session
        return session

    def _leased(
        self, id: str, packages: tuple[str, ...], lease: Lease, claim: LauncherClaim | None = None
    ) -> LeasedCell:
        cell = self._supervisors.open_session(lease.supervisor, claim)
        cell.keep_record(id, self._pipeline.policy.name)
        return LeasedCell(id, packages, cell, lease, self._ports.of_cell(cell))

    def _open_again(
        self, last: LeasedCell, claim: LauncherClaim | None, memory_bytes: int
    ) -> LeasedCell:
        """Return a fresh cell for a session that is paused; raises BusyError, LaunchError."""
        self._supervisors.make_room(_ROOM_SECONDS)
        if self._services.idle:
            self._services.idle.make_room(memory_bytes)
        leased = self._leased(last.id, last.packages, last.lease, claim)
        leased.cell.may_evict = lambda: False  # until the session has it
        return leased


def _language(name: str) -> str:
    try:
        return check_language(name)
    except Rejected as refusal:
        raise PolicyError(f"language: {refusal}") from None

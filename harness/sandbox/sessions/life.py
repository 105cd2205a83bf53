"""`SessionLife`: a session in cells of this process, and `IdlePauses`, which pauses idle sessions.

A session has one cell after the other: it is paused when it gives up a cell, and its next request
finds it in a fresh one.  Its state is that of its last cell (runner/sessions/events.py).
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ....policies.errors import BusyError, CellwrightError, ClosedError, PauseError, SessionLost
from ....policies.plan import FIXED_ADDRESSES
from ....runner.cells.held_cell import LauncherClaim
from ....runner.concurrency import begin_thread
from ....runner.requests.result import NetworkRecord
from ....runner.sessions.attention import SessionAge, outlives
from ....runner.sessions.events import SessionEvents, SessionState, gone
from ....runner.sessions.session_cell import SessionCell
from ....runner.settings import SessionSettings
from ....runner.supervisor import Supervisors
from ..calls.admission import Admission
from ..network.exposed_ports import ExposedPorts, SandboxPorts
from ..packaged import Lease
from ..parameters import SessionArguments
from .history import History
from .state_file import launcher_ended

if TYPE_CHECKING:
    from ....runner.sessions.branches import BranchingProcess
    from ..images.image import StoredImage
    from ..sandbox_skills import SandboxSkills
    from ..workspaces.workspace_calls import SessionWorkspace
    from .pausing import KeptState, Pausable, Pausing
    from .skill_saving import MakeSupervisor

_T = TypeVar("_T")
ROOM_SECONDS = 30.0  # how long to wait for an idle session when the limit is reached
_TOO_OLD = "it lived for too long (lifetime_seconds), paused at the end"
# Bytes of past calls kept with a paused session, so that it can still be forked.
_PAUSED_CALLS_BYTES = 65_536
_DAY = 86_400.0
_LEAST_SECONDS = 0.05  # between two looks at idle sessions


class SessionServices(NamedTuple):
    """State that the sessions of one sandbox share.

    `replaying` makes launchers whose cells see a skill below /skills, to try one that is made of a
    session; a kept one is added to `skills`, those of the sandbox.
    """

    supervisors: Supervisors
    admission: Admission
    ports: SandboxPorts
    settings: SessionSettings
    branching: "BranchingProcess"
    pausing: "Callable[[], Pausing]"
    replaying: "MakeSupervisor"
    skills: "SandboxSkills | None"
    idle: "IdlePauses | None"  # if idle sessions are paused
    image: "StoredImage | None" = None  # the root of cells, if it is an image

    def make_room(self, memory_bytes: int = 0) -> None:
        """Pause or evict idle sessions until there is room for another one; raises BusyError."""
        self.supervisors.make_room(ROOM_SECONDS)
        if self.idle:
            self.idle.make_room(memory_bytes)


class _Paused(NamedTuple):
    """The facts about a paused session."""

    kept: "KeptState"
    age: SessionAge
    memory_bytes: int  # memory that its cell took
    claim: LauncherClaim | None  # None if a cell of any launcher will do


class SessionLife(SessionEvents):
    """Safe from many threads.

    A request that comes while the session is being paused, or is paused, waits and then resumes it,
    once for all that wait.
    """

    def __init__(
        self, services: SessionServices, given: SessionArguments, lease: Lease,
        kept_in: "SessionWorkspace | None" = None, why: str = "",
    ) -> None:  # fmt: skip
        """Open a cell for the session that is `given` with its id.  The trail gets `why` as the reason.

        Raises BusyError, LaunchError; else the `lease` is closed when the session has ended.
        """
        self.id = given.id or ""
        self.given = given
        self.lease = lease
        self.kept_in = kept_in
        self.history = History()
        self._services = services
        self._idle = None if kept_in else services.idle
        self._owner = os.getpid()
        self._turn = threading.Lock()  # held while it is paused, resumed or closed
        self._counting = threading.Lock()  # guards the next one
        self._wanted = 0  # calls that use the cell or wait for it
        self._paused: _Paused | None = None
        self._refused_at = -1.0  # time of the last use after which pausing failed
        cell = self._new_cell(None)
        self._tell("opened", why)
        self._take(cell)
        if self._idle:
            self._idle.add(self)

    def _new_cell(self, claim: LauncherClaim | None) -> SessionCell:
        services = self._services
        cell = services.supervisors.open_session(self.lease.supervisor, claim)
        cell.keep_record(self.id, services.admission.policy.name)
        return cell

    def _take(self, cell: SessionCell) -> None:
        self.ports: ExposedPorts = self._services.ports.of_cell(cell)
        cell.report_to(self)
        self.cell = cell  # the current cell; while paused, the last one
        if cell.lost and self.kept_in:  # it may have ended before it could report its last look
            self.kept_in.release()

    def _tell(self, action: str, why: str) -> None:
        self._services.admission.record_session(self.id, action, why)

    @property
    def is_paused(self) -> bool:
        return self.cell.state is SessionState.PAUSED

    @property
    def lost(self) -> str:
        """Why it has ended; empty while it has not."""
        return "" if self.is_paused else self.cell.lost

    # Events of its cell.

    def on_begin(self, execution_id: str) -> None:
        self.history.begin(execution_id)

    def on_last_network(self, record: NetworkRecord) -> None:
        self._services.admission.record_network(self.id, record)

    def on_last_look(self, workspace_at_rest: Callable[[], int]) -> None:
        if self.kept_in:
            self.kept_in.keep_for_good(workspace_at_rest)

    def on_leave(self, state: SessionState, action: str, why: str) -> None:
        self.ports.close()
        if state is SessionState.PAUSED:  # the lease goes on
            self.history.shrink(_PAUSED_CALLS_BYTES)
        else:
            self.lease.close()
        self._tell(action, why)

    def on_idle(self, why: str) -> None:
        if self._idle:
            self.try_to_pause(why)

    @property
    def is_evictable(self) -> bool:
        """Whether its state may be lost: if idle sessions are paused, only if it could not be paused
        since its last use, and no call uses it or waits to."""
        if not self._idle:
            return True
        return self._refused_at == self.cell.clock.used_at and not self._wanted

    # Requests.

    def use(self, work: Callable[[SessionCell, float], _T]) -> _T:
        """Do `work` with its cell, and with the seconds that resuming it took, 0 if it was there.

        Raises what `work` raises, PauseError if the session cannot be resumed, and SessionLost if it
        has ended.  `work` is done again if it raises SessionLost because the session was paused.
        """
        with self._counting:
            self._wanted += 1
        try:
            while True:
                cell, seconds = self._present()
                try:
                    return work(cell, seconds)
                except SessionLost:
                    if not self._has_gone_meanwhile(cell):
                        raise
        finally:
            with self._counting:
                self._wanted -= 1
            self.cell.note_rest()

    def _has_gone_meanwhile(self, cell: SessionCell) -> bool:
        if os.getpid() != self._owner:
            return False
        with self._turn:
            return self.is_paused or cell is not self.cell

    def _present(self) -> tuple[SessionCell, float]:
        """Return its cell, resumed if the session is paused, and the seconds that this took."""
        if not self.is_paused:
            return self.cell, 0.0
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")
        began_at = time.monotonic()
        with self._turn:
            if self.is_paused and self._paused:
                self._resume(self._paused)
            return self.cell, time.monotonic() - began_at

    def _resume(self, paused: _Paused) -> None:
        pausing = self._services.pausing()
        if not outlives(paused.age, self._services.settings, self.cell.clock.now()):
            self._end_paused(_TOO_OLD, "expired", "lifetime_seconds")
            raise gone(_TOO_OLD, "lifetime_seconds")
        try:
            if paused.claim and not paused.claim.is_alive():
                raise launcher_ended()
            with pausing.taken(paused.kept.token) as state:
                self._services.make_room(paused.memory_bytes)
                cell = self._new_cell(paused.claim)
                pausing.restore(state, cell)
        except PauseError as error:
            if error.is_final:
                self._end_paused(f"it could not be resumed: {error.what}", "lost")
            raise
        cell.clock.continue_from(paused.age)
        self._tell("resumed", "a request came")
        self._take(cell)
        self._forget_pause()

    def try_to_pause(self, why: str) -> bool:
        """Pause the session if nothing uses it; one that could not be paused is not tried again before
        its next use.  Return whether it is only busy for a moment."""
        used_at = self.cell.clock.used_at
        if self._refused_at == used_at or not self._turn.acquire(blocking=False):
            return False
        try:
            if not self.cell.lost and not self._is_wanted():
                self._pause(why)
        except BusyError:
            return True
        except CellwrightError:  # the session continues as before
            self._refused_at = used_at
        finally:
            self._turn.release()
        return False

    def _pause(self, why: str) -> None:
        cell, size = self.cell, self.cell.memory_bytes()
        with self._services.pausing().kept(self.pausable(), is_use=False) as kept:
            claim = None if FIXED_ADDRESSES in cell.plan.layers else cell.claim()
            self._paused = _Paused(kept, cell.clock.age, size, claim)
            is_paused = False
            try:
                is_paused = cell.pause(why, lambda: not self._is_wanted())
            finally:
                if not is_paused:
                    self._forget_pause()
            if not is_paused:
                raise PauseError("pause: a request came meanwhile")

    def pausable(self) -> "Pausable":
        from .pausing import Pausable  # seldom needed

        return Pausable(self.given, self.cell, self.lease.supervisor)

    def _is_wanted(self) -> bool:
        return self._wanted > 0 or self.ports.are_open

    def pause(self) -> str:
        """Keep its state, end the session, and return the token; raises what `Session.pause` does."""
        why = "it was paused"
        with self._turn:
            if self.lost:
                raise gone(self.lost, self.cell.expired)
            pausing = self._services.pausing()
            self._require_another_like_it()
            if paused := self._paused:
                token = pausing.give_away(paused.kept)
                self.cell.end(why, "paused")
                self._forget_pause()
                return token
            with pausing.kept(self.pausable()) as kept:
                self.cell.end(why, "paused")
            return kept.token

    def _require_another_like_it(self) -> None:
        """Raise PauseError unless a cell that is opened later could be its equal."""
        is_current = self.cell.launcher_id == self.lease.supervisor.generation.id
        if not is_current and FIXED_ADDRESSES not in self.cell.plan.layers:
            raise PauseError("pause: the session cannot be paused: its launcher was replaced")

    def end(self, why: str, action: str = "closed") -> None:
        """End the session, and remove its state if it is paused; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        if not self.is_paused:
            self.cell.end(why, action)  # at once, also while it is being paused
        with self._turn:
            self._end_paused(why, action)  # it may have been resumed meanwhile

    def _end_paused(self, why: str, action: str, expired: str = "") -> None:
        self.cell.end(why, action, expired)
        if self._paused:
            with contextlib.suppress(CellwrightError):  # the disk fails
                self._services.pausing().remove(self._paused.kept)
            self._forget_pause()

    def _forget_pause(self) -> None:
        paused, self._paused = self._paused, None
        if paused and paused.claim:
            paused.claim.release()


class IdlePauses:
    """Pauses the sessions of one sandbox that were idle for long, and those that were idle longest
    while all of them take too much memory.

    Safe from many threads; its own looks when a session is due, and after requests.
    """

    def __init__(self, settings: SessionSettings, sweep: Callable[[], None]) -> None:
        """`sweep` removes what earlier processes have left."""
        self._settings = settings
        self._sweep = sweep
        self._lock = threading.Lock()  # guards the next one
        self._sessions: list[SessionLife] = []
        self._fitting = threading.Lock()
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, session: SessionLife) -> None:
        """Look after a session until it has ended."""
        with self._lock:
            self._sessions.append(session)
            if self._thread is None:
                self._thread = begin_thread("cellwright-pauses", self._watch)
        self._wake.set()

    def note_rest(self) -> None:
        """Look soon: a session has become idle, and may have grown."""
        if self._settings.memory_bytes is not None:
            self._wake.set()

    def paused(self) -> int:
        """Return how many sessions are paused."""
        return sum(each.is_paused for each in self._known())

    def make_room(self, extra_bytes: int) -> None:
        """Pause sessions that are idle until all take `extra_bytes` less than they may, if they can be
        paused."""
        most = self._settings.memory_bytes
        if most is None:
            return
        with self._fitting:
            sizes = [(each, each.cell.memory_bytes()) for each in self._alive()]
            over = sum(size for _, size in sizes) + extra_bytes - most
            for session, size in sizes:
                if over <= 0:
                    return
                self._try_to_pause(session, "idle longest while all take more than memory_bytes")
                over -= size if session.is_paused else 0

    def look(self) -> float:
        """Pause due sessions, and return the seconds until the next one is due."""
        after, due = self._settings.pause_seconds, _DAY
        for session in self._alive() if after is not None else ():
            if (left := (after or 0.0) - session.cell.clock.idle_seconds) <= 0:
                self._try_to_pause(session, f"it was idle for {after:g} s")
            if not session.is_paused:
                due = min(due, left if left > 0 else after or 0.0)
        self.make_room(0)
        return due

    def _try_to_pause(self, session: SessionLife, why: str) -> None:
        if session.try_to_pause(why):
            self._wake.set()  # look again soon: nothing signals that a session is no longer busy

    def _known(self) -> list[SessionLife]:
        with self._lock:
            self._sessions = [each for each in self._sessions if not each.lost]
            return list(self._sessions)

    def _alive(self) -> list[SessionLife]:
        """Return the sessions that have a cell, idle longest first."""
        alive = [each for each in self._known() if not each.is_paused]
        return sorted(alive, key=lambda each: each.cell.clock.used_at)

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the disk fails
            self._sweep()
        while not self._end.is_set():
            due = _DAY
            self._wake.clear()
            with contextlib.suppress(Exception):  # this thread has to go on for the others
                due = self.look()
            self._end.wait(_LEAST_SECONDS)
            self._wake.wait(due)

    def close(self) -> None:
        """Pause no more; the paused sessions stay so."""
        self._end.set()
        self._wake.set()
        with self._lock:
            thread = self._thread
        if thread:
            thread.join()

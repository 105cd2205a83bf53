"""Session cells: each lives across requests, with its interpreter's state and its files.

A `SessionCell` is the state machine of its session: what it is now, and the ways that it can go
(events.py).
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    LauncherLost,
    SessionLost,
)
from ...policies.plan import Plan
from ...policies.policy import Limits
from ..cells.cell import pid_of
from ..cells.held_cell import HeldCell, LauncherClaim
from ..cgroups.cgroup_tree import usage_at
from ..concurrency import ConcurrencyLimit
from ..launching.living import KeptRecord, keep_record
from ..requests.execution import SessionPast, SessionTurns, called_off
from ..requests.request import Request
from ..requests.result import SandboxResult
from ..settings import SessionSettings
from .attention import SessionAttention, SessionClock
from .events import WAYS, SessionEvents, SessionState, gone

if TYPE_CHECKING:
    from ..cells.cell_network import CellNetwork

_WAIT_SECONDS = 30.0  # how long to wait for the running request
_EXPIRED = {
    "idle_seconds": "it was idle for too long (idle_seconds)",
    "lifetime_seconds": "it lived for too long (lifetime_seconds)",
}


class SessionCell:
    """A cell and its requests, which are served one after the other in order of arrival."""

    def __init__(
        self, held: HeldCell, limits: Limits, settings: SessionSettings,
        give_back: Callable[[HeldCell], None], table: SessionEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._held = held
        self.language = held.plan.language
        self._turns = SessionTurns(held)
        self.limits = limits
        self._give_back = give_back
        self._concurrency = ConcurrencyLimit(1, _WAIT_SECONDS)
        self._owner = os.getpid()
        self.clock = SessionClock(settings, limits, clock)
        self._record: KeptRecord | None = None
        self.attention = SessionAttention(held)
        self._table = table
        # Guards the fields below; reentrant, because a finalizer may close the sandbox in this thread.
        self._lock = threading.RLock()
        self._session = SessionEvents()
        self.state = SessionState.LIVE
        self.lost = ""  # why the cell is gone: the session is paused, or has ended
        self.expired = ""  # the setting that has ended it, if one has
        self._action = ""  # how the trail names that
        self._holders = 0  # threads that use its descriptors
        self._users = 0  # uses other than requests, such as connections to exposed ports

    def report_to(self, session: SessionEvents) -> None:
        """Report to the session that the cell belongs to from now on; if it is gone, at once."""
        with self._lock:
            self._session = session
            action = self._action
        if action:
            session.on_leave(self.state, action, self.lost)

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Keep the cell's descriptors open for a while, and return that of /workspace.

        If they were closed while a thread uses them, another cell could get their numbers.  Raises
        SessionLost, and ClosedError in a forked child of the owner.
        """
        self._require_owner()
        with self._lock:
            self._require_life()
            self._holders += 1
        try:
            yield self._held.cell.workspace
        finally:
            with self._lock:
                self._holders -= 1
                last = bool(self.lost) and not self._holders
            if last:
                self._dispose()

    def network(self) -> "CellNetwork | None":
        """Return the cell's network, which the caller closes; None if its policy has no loopback.

        Raises SessionLost.
        """
        with self.held():
            return self._held.network()

    def execute(self, request: Request) -> SandboxResult:
        """Run `request` with the state that earlier requests left.

        Raises SessionLost if the cell was already gone, BusyError if the running request does not
        end.
        """
        self._require_owner()  # before any lock, which another thread may have held at a fork
        asked_at = time.monotonic()
        if not self._concurrency.acquire(request.cancel):
            return called_off(request, asked_at, self.plan.layers)
        try:
            with self.held(), self.attention.away(lambda: self._turns.waits_at_doors(request)):
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                if path := self._held.origin.uncovered():
                    self.end(
                        f"{path}, which the policy hides, was replaced or made after the start"
                    )
                self._thaw()
                self._session.on_begin(request.execution_id)
                return self._execute_to_the_end(request, asked_at)
        finally:
            self._note_use()
            self._rest()

    def _rest(self) -> None:
        self._concurrency.release()
        self._table.on_rest()

    def _execute_to_the_end(self, request: Request, asked_at: float) -> SandboxResult:
        """Execute, and end the session if an exception interrupts this before the guest's answer:
        the program would go on, and its answer would be taken for the next request's."""
        try:
            return self._execute(request, asked_at)
        except LauncherLost as error:
            if self.lost:  # the sandbox was closed while this ran
                raise SessionLost(f"the session is gone: {self.lost}") from None
            self.end(str(error))
            raise
        except BaseException as error:
            self.end(f"request {self._turns.requests} was left: {type(error).__name__}")
            raise

    def _execute(self, request: Request, asked_at: float) -> SandboxResult:
        result, stays = self._turns.perform(request, asked_at, lambda: bool(self.lost))
        served = self._turns.requests
        if not stays:
            self.end(f"request {served} ended it: {result.reason}, {result.error}")
        elif served >= self.clock.settings.requests:
            self.end(f"it has served {served} requests")
        return result

    def _require_life(self) -> None:
        if self.lost:
            raise gone(self.lost, self.expired)

    def at_rest(self, look: Callable[[int], None]) -> None:
        """Call `look` with a descriptor of /workspace while no request runs; raises SessionLost,
        and BusyError if the running request does not end."""
        self._require_owner()
        self._concurrency.acquire()
        try:
            with self.held() as workspace, self.attention.away():
                look(workspace)
        finally:
            self._concurrency.release()

    @contextlib.contextmanager
    def resting(self, *, is_use: bool = True) -> Iterator[tuple[HeldCell, SessionPast]]:
        """Keep requests away, and yield the thawed cell and the outcome of its requests so far; raises
        SessionLost, and BusyError if the running request does not end.

        Without `is_use`: raise BusyError at once if a request runs, and leave a session that was idle
        or frozen so.
        """
        self._require_owner()
        if is_use:
            self._concurrency.acquire()
        elif not self._concurrency.try_acquire():
            raise BusyError("a request of the session runs")
        used_at, was_frozen = self.clock.used_at, self.is_frozen
        try:
            with self.held(), self.attention.away():
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                self._thaw()
                yield self._held, self._turns.past()
        finally:
            if is_use:
                self._note_use()
            elif not self.lost:
                self.clock.used_at = used_at
                if was_frozen:
                    self._stop()
            self._rest()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[HeldCell]:
        """Yield the cell of a session that no caller knows yet, and keep it from being frozen; its
        processes' calls are answered meanwhile. Raises SessionLost."""
        self.begin_use()
        try:
            with self.held():
                yield self._held
        finally:
            self.end_use()

    def continue_from(self, past: SessionPast) -> None:
        """Take over the history of another session, of which this is now a branch."""
        self._turns.continue_from(past)

    @property
    def plan(self) -> Plan:
        """The plan of its cell."""
        return self._held.plan

    @property
    def launcher_id(self) -> str:
        """Names the launcher from which its cell was forked."""
        return self._held.origin.id

    def claim(self) -> LauncherClaim:
        """Keep its launcher, even if that is replaced, until the claim is released."""
        return LauncherClaim(self._held.origin)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")

    def due_at(self) -> float:
        """Return the moment, by time.monotonic, at which `look` may find a reason to end the
        session."""
        return self.clock.due_at(is_frozen=self.is_frozen)

    def memory_bytes(self) -> int:
        """Return the memory that it takes, 0 where nothing counts it or if it is gone."""
        with contextlib.suppress(SessionLost), self.held():
            return usage_at(self._held.cell.cgroup.places).memory_bytes or 0
        return 0

    def attend(self) -> None:
        """Answer calls of threads and children between two requests; end the session if they exceed
        a limit. During a request this does nothing: its supervision answers."""
        if self.attention.has_listener and self._concurrency.try_acquire():
            try:
                with self.held():
                    complaint = self.attention.answer()
                if complaint:
                    self.end(complaint)
            except SessionLost:
                return
            finally:
                self._rest()

    def look(self) -> None:
        """End the session if it was idle or lived too long, or if its CPU time or memory is used
        up.

        Supervision checks these while a request runs; threads and children that a request left go
        on between requests, when only this method looks.
        """
        clock = self.clock
        now = clock.now()
        if self.is_in_use:
            self._note_use()
        expires_at, limit = clock.expiry()
        if expires_at <= now:
            self.try_to_evict(_EXPIRED[limit], expired=limit)
            return
        if self.is_frozen:
            return
        if clock.freeze_at <= now:
            self.freeze()
        with contextlib.suppress(SessionLost), self.held():
            if why := clock.complaint(self._held.cell, self._turns.cpu_before):
                self.try_to_evict(why, "lost")

    def extend(self, seconds: float) -> None:
        """Let the session live for `seconds` from now at least, however idle or old; raises
        SessionLost."""
        with self.held():
            self.clock.extend(seconds)

    @property
    def is_frozen(self) -> bool:
        return self.state is SessionState.FROZEN

    def freeze(self) -> bool:
        """Stop its processes now, unless a request runs or something else uses it; tell whether they
        stand still."""
        self._require_owner()
        self.clock.freeze_at = (
            self.clock.now() + self.clock.settings.freeze_seconds
        )  # try again then
        if self._concurrency.try_acquire():
            try:
                self._stop()
            finally:
                self._rest()
        return self.is_frozen

    def _stop(self) -> None:
        with self._lock:
            if not self.lost and not self._users:
                is_frozen = self._held.cell.cgroup.freeze()
                if not self.lost:
                    self.state = SessionState.FROZEN if is_frozen else SessionState.LIVE

    def _thaw(self, new_users: int = 0) -> None:
        with self._lock:
            self._require_life()
            self._users += new_users
            was_frozen, self.state = self.is_frozen, SessionState.LIVE
            self._held.cell.cgroup.thaw()
        if was_frozen:
            self._note_use()
            self._table.on_thaw()

    def keep_record(self, id: str, policy: str) -> None:
        """Have the session listed as `id` (living.py) while it lives."""
        with contextlib.suppress(SessionLost, ProcessLookupError), self.held():
            cell = self._held.cell
            init, cgroup = pid_of(cell.pidfd), cell.cgroup
            self._record = keep_record(
                "session", init, policy, self.language, cgroup.places, id,
                cpu_seconds_before=cgroup.cpu_seconds_before,
            )  # fmt: skip
        if self.lost and self._record:  # it ended meanwhile
            self._record.remove()

    def _note_use(self) -> None:
        self.clock.note_use()
        if self._record:
            self._record.touch()

    @property
    def is_in_use(self) -> bool:
        """Tell whether something other than requests uses it, such as a terminal."""
        return self._users > 0

    def begin_use(self) -> None:
        """Thaw the session, and keep it from being idle until `end_use`; raises SessionLost."""
        self._require_owner()
        self._thaw(new_users=1)

    def end_use(self) -> None:
        self._note_use()
        with self._lock:
            self._users -= 1

    def note_rest(self) -> None:
        """Let those try again that wait for a cell to be idle: fewer calls want this one."""
        self._table.on_rest()

    @property
    def is_evictable(self) -> bool:
        return self._session.is_evictable

    def try_to_pause(self, why: str) -> bool:
        """Have the session paused, unless a request runs, something uses it, or it cannot be paused;
        return whether it is gone."""
        if not self.lost:
            self._session.on_idle(why)
        return bool(self.lost)

    def try_to_evict(self, why: str, action: str = "evicted", expired: str = "") -> bool:
        """End the session unless a request runs; return whether it is gone.

        `expired` is the setting that ends it, if one does.
        """
        if not self._concurrency.try_acquire():
            return bool(self.lost)
        try:
            self.end(why, action, expired)
        finally:
            self._concurrency.release()
        return True

    def end(self, why: str, action: str = "lost", expired: str = "") -> None:
        """End the session, once; the trail calls it `action`.

        Its processes are killed; the cell is taken down now, or by the last thread that uses it.
        In a forked child of the owner this does nothing.
        """
        self._leave(SessionState.ENDED, why, action, expired)

    def pause(self, why: str, is_free: Callable[[], bool]) -> bool:
        """Give up the cell of a session whose state was kept, unless something other than requests uses
        it, as far as `is_free` tells too; return whether so.  The caller keeps requests away."""
        return self._leave(SessionState.PAUSED, why, "paused", is_free=is_free)

    def _leave(
        self, state: SessionState, why: str, action: str, expired: str = "",
        is_free: Callable[[], bool] | None = None,
    ) -> bool:  # fmt: skip
        """Leave the cell for good, unless `is_free` is given and tells that it is used."""
        if os.getpid() != self._owner:
            return False
        with self._lock:
            if is_free and (self._users or not is_free()):
                return False
            if state not in WAYS[self.state]:
                return False
            has_cell = not self.lost
            self.state, self.lost, self.expired, self._action = state, why, expired, action
            session, last = self._session, has_cell and not self._holders
            if has_cell:
                self.attention.close()
                if not last:
                    self._held.cell.kill()
        if last:
            self._dispose()
        if has_cell and self._record:
            self._record.remove()
        session.on_leave(state, action, why)
        self._table.on_rest()
        return True

    def _dispose(self) -> None:
        with contextlib.suppress(CellwrightError):  # the launcher died; all is freed nevertheless
            try:
                self._session.on_last_look(self._held.workspace_at_rest)
            finally:
                try:
                    self._settle_network()
                finally:
                    self._give_back(self._held)

    def _settle_network(self) -> None:
        """Have the connections end, and the records reach the trail, that no result will have."""
        if self._held.egress is None:
            return
        cell = self._held.cell
        cell.kill_init()
        cell.cgroup.thaw()  # on cgroup v1 killed processes die only when thawed
        if any(network := self._held.settle_egress(ends=True)):
            self._session.on_last_network(network)

"""Session cells: each lives across requests, with its interpreter's state and its files."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    LauncherLost,
    SessionExpired,
    SessionLost,
)
from ..policies.languages import PYTHON
from ..policies.plan import Plan
from ..policies.policy import Limits
from .capture import OnOutput
from .cells import pid_of
from .cgroups.tree import usage_at
from .concurrency import ConcurrencyLimit
from .execution import called_off
from .held_cell import HeldCell
from .launcher_claim import LauncherClaim
from .living import KeptRecord, keep_record
from .request import Request
from .result import SandboxResult
from .session_attention import SessionAttention
from .session_clock import SessionAge, SessionClock
from .session_freezer import SessionFreezer
from .session_turns import SessionPast, SessionTurns
from .settings import SessionSettings

if TYPE_CHECKING:
    from .cell_network import CellNetwork
    from .result import NetworkRecord

_WAIT_SECONDS = 30.0  # for the running request to end
_EXPIRED = {
    "idle_seconds": "it was idle for too long (idle_seconds)",
    "lifetime_seconds": "it lived for too long (lifetime_seconds)",
}


class SessionCell:
    """A cell and its requests, which are served one after the other in order of arrival."""

    def __init__(
        self, held: HeldCell, layers: tuple[str, ...], limits: Limits, settings: SessionSettings,
        give_back: Callable[[HeldCell], None], language: str = PYTHON,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._held = held
        self._layers = layers
        self._turns = SessionTurns(held, layers, language)
        self.limits = limits
        self.language = language
        self._give_back = give_back
        self._concurrency = ConcurrencyLimit(1, _WAIT_SECONDS)
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards the next two
        self._holders = 0
        self._clock = SessionClock(settings, limits, clock)
        self._freezer = SessionFreezer(held.cell.cgroup)
        self._record: KeptRecord | None = None
        self.lost = ""  # why it is gone
        self.expired = ""  # the setting that has ended it, if one has
        self.on_thaw: Callable[[], None] = lambda: None
        self.on_rest: Callable[[], None] = lambda: None  # whenever it is idle again, and at the end
        # Keeps its state on disk and ends it, if nothing uses it.
        self.on_idle: Callable[[str], object] = lambda why: None
        self.may_evict: Callable[[], bool] = lambda: True
        self.attention = SessionAttention(held)
        self.on_begin: Callable[[str], None] = lambda execution_id: None
        self.on_end: Callable[[str, str], None] = lambda action, why: None
        self.on_last_network: Callable[[NetworkRecord], None] = lambda record: None
        # Called before the cell is taken down, with what kills it and then gives its /workspace.
        self.on_last_look: Callable[[Callable[[], int]], None] | None = None

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

    def execute(self, request: Request, on_output: OnOutput | None, cancel: int) -> SandboxResult:
        """Run `request` with the state that earlier requests left.

        Raises SessionLost if the cell was already gone, BusyError if the running request does not
        end.
        """
        self._require_owner()  # before any lock: another thread may have held it
        asked_at = time.monotonic()
        if not self._concurrency.acquire(cancel):
            return called_off(request, asked_at, self._layers)
        try:
            with self.held(), self.attention.away(lambda: self._turns.waits_at_doors(request)):
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                if path := self._held.uncovered():
                    self.end(
                        f"{path}, which the policy hides, was replaced or made after the start"
                    )
                self._require_life()
                self._thaw()
                self.on_begin(request.execution_id)
                return self._execute_to_the_end(request, asked_at, on_output, cancel)
        finally:
            self._note_use()
            self._rest()

    def _rest(self) -> None:
        self._concurrency.release()
        self.on_rest()

    def _execute_to_the_end(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        """Execute, and end the session if an exception interrupts this before the guest's answer:
        the program would go on, and its answer would be taken for the next request's."""
        try:
            return self._execute(request, asked_at, on_output, cancel)
        except LauncherLost as error:
            if self.lost:  # the sandbox was closed while this ran
                raise SessionLost(f"the session is gone: {self.lost}") from None
            self.end(str(error))
            raise
        except BaseException as error:
            self.end(f"request {self._turns.requests} was left: {type(error).__name__}")
            raise

    def _execute(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        result, stays = self._turns.perform(
            request, asked_at, on_output, cancel, lambda: bool(self.lost)
        )
        served = self._turns.requests
        if not stays:
            self.end(f"request {served} ended it: {result.reason}, {result.error}")
        elif served >= self._clock.settings.requests:
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
        """Keep requests away, and yield the thawed cell and what its requests came to so far; raises
        SessionLost, and BusyError if the running request does not end.

        Without `is_use`: raise BusyError at once if a request runs, and leave a session that was idle
        or frozen so.
        """
        self._require_owner()
        if is_use:
            self._concurrency.acquire()
        elif not self._concurrency.try_acquire():
            raise BusyError("a request of the session runs")
        used_at, was_frozen = self.used_at, self.is_frozen
        try:
            with self.held(), self.attention.away():
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                self._require_life()
                self._thaw()
                yield self._held, self._turns.past()
        finally:
            if is_use:
                self._note_use()
            elif not self.lost:
                self._clock.used_at = used_at
                if was_frozen:
                    self._freezer.freeze()
            self._rest()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[HeldCell]:
        """Yield the cell of a session that no caller knows yet, and keep it from being frozen; what its
        processes open meanwhile is answered.  Raises SessionLost."""
        self.begin_use()
        try:
            with self.held():
                yield self._held
        finally:
            self.end_use()

    def continue_from(self, past: SessionPast) -> None:
        """Go on where another session was, of which this is a branch by now."""
        self._turns.continue_from(past)

    @property
    def plan(self) -> Plan:
        """What its cell may do."""
        return self._held.plan

    @property
    def launcher_id(self) -> str:
        """Names the launcher from which its cell was forked."""
        return self._held.launcher_id

    def claim(self) -> LauncherClaim:
        """Keep its launcher, even if that is replaced, until the claim is released."""
        return LauncherClaim(self._held.origin)

    def take_age(self, age: SessionAge) -> None:
        """Be as old as the session was that goes on in this cell."""
        self._clock.continue_from(age)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")

    def due_at(self) -> float:
        """Return the moment, by time.monotonic, at which `look` may find a reason to end the
        session."""
        return self._clock.due_at(is_frozen=self.is_frozen)

    @property
    def used_at(self) -> float:
        """The moment, by time.monotonic, of its last use."""
        return self._clock.used_at

    @property
    def idle_seconds(self) -> float:
        """How long it has not been used."""
        return self._clock.now() - self._clock.used_at

    def now(self) -> float:
        return self._clock.now()

    @property
    def age(self) -> SessionAge:
        return self._clock.age

    def memory_bytes(self) -> int:
        """Return the memory that it takes, 0 where nothing counts it or if it is gone."""
        with contextlib.suppress(SessionLost), self.held():
            return usage_at(self._held.cell.cgroup.places).memory_bytes or 0
        return 0

    def attend(self) -> None:
        """Answer what threads and children attempt between two requests; end the session if they
        exceed a limit.  During a request this does nothing: its supervision answers."""
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
        clock = self._clock
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
            self._clock.extend(seconds)

    @property
    def is_frozen(self) -> bool:
        return self._freezer.is_frozen

    def freeze(self) -> bool:
        """Stop its processes now, unless a request runs or something else uses it; tell whether they
        stand still."""
        self._clock.freeze_at = (
            self._clock.now() + self._clock.settings.freeze_seconds
        )  # again then
        if self._concurrency.try_acquire():
            try:
                with contextlib.suppress(SessionLost), self.held():
                    self._freezer.freeze()
            finally:
                self._rest()
        return self.is_frozen

    def _thaw(self) -> None:
        if self._freezer.thaw():
            self._note_use()
            self.on_thaw()

    def keep_record(self, id: str, policy: str) -> None:
        """Have the session listed as `id` (living.py) while it lives."""
        with contextlib.suppress(SessionLost, ProcessLookupError), self.held():
            cell = self._held.cell
            init = pid_of(cell.pidfd)
            self._record = keep_record(
                "session", init, policy, self.language, cell.cgroup.places, id
            )
        if self.lost and self._record:  # it ended meanwhile
            self._record.remove()

    def _note_use(self) -> None:
        self._clock.note_use()
        if self._record:
            self._record.touch()

    @property
    def is_in_use(self) -> bool:
        """Tell whether something other than requests uses it, such as a terminal."""
        return self._freezer.is_in_use

    def begin_use(self) -> None:
        """Thaw the session, and keep it from being idle until `end_use`; raises SessionLost."""
        with self.held():
            if not self._freezer.begin_use():
                raise gone("it is being paused", "")
            self._thaw()

    def end_use(self) -> None:
        self._note_use()
        self._freezer.end_use()

    def end_unless_used(self, why: str, is_free: Callable[[], bool]) -> bool:
        """End a session whose state was kept, unless something other than requests uses it, as far as
        `is_free` tells too; return whether it is gone.  The caller keeps requests away."""
        if not self._freezer.shut(is_free):
            return False
        self.end(why, "paused")
        return self.lost == why  # else it was closed meanwhile

    def try_to_pause(self, why: str) -> bool:
        """Have the state kept on disk and the session ended, unless a request runs, something uses it,
        or it cannot be paused; return whether it is gone."""
        if not self.lost:
            self.on_idle(why)
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
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self.lost:
                return
            self.lost, self.expired = why, expired
            self.attention.close()
            last = not self._holders
            if not last:
                self._held.cell.kill()
        if last:
            self._dispose()
        if self._record:
            self._record.remove()
        self.on_end(action, why)
        self.on_rest()

    def _dispose(self) -> None:
        with contextlib.suppress(CellwrightError):  # its launcher died: all is freed even so
            try:
                if self.on_last_look:
                    self.on_last_look(self._held.workspace_at_rest)
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
        cell.cgroup.thaw()  # on v1 the killed die only then
        if any(network := self._held.settle_egress(ends=True)):
            self.on_last_network(network)


def gone(why: str, expired: str = "") -> SessionLost:
    """Return the error for a session that has ended; `expired` is the setting that ended it, if any."""
    message = f"the session is gone: {why}"
    if expired:
        hint = f"open another one; more {expired}, or extend(), lets it live longer"
        return SessionExpired(message, hint, limit=expired)
    return SessionLost(message, "open another one")

"""`ReturningCell`: the cell of a session, which goes away while the session is paused and comes back
with its next request."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ...policies.closing import Closing
from ...policies.errors import BusyError, CellwrightError, ClosedError, PauseError, SessionLost
from ...policies.plan import FIXED_ADDRESSES, Plan
from ...runner.launcher_claim import LauncherClaim
from ...runner.session import SessionCell, gone
from ...runner.session_clock import SessionAge, outlives
from ...runner.settings import SessionSettings
from .packaged import Lease
from .pausing.differences import launcher_ended
from .ports.exposed import ExposedPorts

if TYPE_CHECKING:
    from ...runner.held_cell import HeldCell
    from .pausing.pausing import KeptState, Pausing

_T = TypeVar("_T")
OpenAgain = Callable[["LeasedCell", LauncherClaim | None, int], "LeasedCell"]
_TOO_OLD = "it lived for too long (lifetime_seconds), paused at the end"


class LeasedCell(Closing):
    """The cell of a session, with the lease of its launcher and its exposed ports."""

    def __init__(
        self, id: str, packages: tuple[str, ...], cell: SessionCell, lease: Lease, ports: ExposedPorts
    ) -> None:  # fmt: skip
        """`packages`: what the session was opened with."""
        self.id = id
        self.packages = packages
        self.cell = cell
        self.lease = lease
        self.ports = ports

    @property
    def language(self) -> str:
        return self.cell.language

    @property
    def plan(self) -> Plan:
        return self.cell.plan

    def require_another_like_it(self) -> None:
        """Raise PauseError unless a cell that is opened later could be its equal."""
        is_current = self.cell.launcher_id == self.lease.supervisor.generation.id
        if not is_current and FIXED_ADDRESSES not in self.plan.layers:
            raise PauseError("pause: the session cannot be paused: its launcher was replaced")

    @contextlib.contextmanager
    def fresh_cell(self) -> "Iterator[HeldCell]":
        """Lend another cell of its launcher."""
        claim = self.cell.claim()
        try:
            with self.lease.supervisor.fresh_cell(claim) as fresh:
                yield fresh
        finally:
            claim.release()

    def release(self) -> None:
        """Return what the session held that has ended; a second call does nothing."""
        self.ports.close()
        self.lease.close()

    def close(self) -> None:
        """End the cell; the lease goes on."""
        self.cell.end("it was closed", "closed")
        self.ports.close()


class ReturningCell:
    """Safe from many threads.

    A request that comes while the session is being paused, or is paused, waits and then resumes it,
    once for all that wait.  `open_again` opens a cell for it, `adopt` makes it the session's, and
    `tell` writes to the trail what became of the session.
    """

    def __init__(
        self, first: LeasedCell, settings: SessionSettings, pausing: "Callable[[], Pausing]",
        open_again: OpenAgain, adopt: Callable[[LeasedCell], None], tell: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        """`open_again` takes the last cell, whose lease goes on, the claim on its launcher, and the
        bytes of memory that the session had."""
        self._settings = settings
        self._pausing = pausing
        self._open_again = open_again
        self._adopt = adopt
        self._tell = tell
        self._owner = os.getpid()
        self._turn = threading.Lock()  # held while it is paused, resumed or closed
        self._counting = threading.Lock()  # guards the next one
        self._wanted = 0  # calls that use it, or wait to
        self._here = first  # the last one, while it is paused
        self._kept: KeptState | None = None  # while it is paused
        self._age: SessionAge | None = None  # when it was paused
        self._bytes = 0
        self._claim: LauncherClaim | None = None  # unless the cell of any launcher will do
        self._lost = ""  # why it has ended while it was paused
        self._expired = ""
        self._refused_at = -1.0  # its last use, after which it could not be paused

    @property
    def here(self) -> LeasedCell:
        """Its cell, the last one that it had if it is paused."""
        return self._here

    @property
    def is_paused(self) -> bool:
        return self._kept is not None

    @property
    def lost(self) -> str:
        return self._lost or ("" if self._kept else self._here.cell.lost)

    @property
    def expired(self) -> str:
        return self._expired or ("" if self._kept else self._here.cell.expired)

    def use(self, work: Callable[[LeasedCell, float], _T]) -> _T:
        """Do `work` with its cell, and with the seconds that resuming it took, 0 if it was there.

        Raises what `work` raises, PauseError if the session cannot be resumed, and SessionLost if it
        has ended.  `work` is done again if it raises SessionLost because the session was paused.
        """
        with self._counting:
            self._wanted += 1
        try:
            while True:
                here, seconds = self._present()
                try:
                    return work(here, seconds)
                except SessionLost:
                    if not self._has_gone_meanwhile(here):
                        raise
        finally:
            with self._counting:
                self._wanted -= 1
            self._here.cell.on_rest()

    def _has_gone_meanwhile(self, here: LeasedCell) -> bool:
        if os.getpid() != self._owner:
            return False
        with self._turn:
            return self.is_paused or here is not self._here

    def _present(self) -> tuple[LeasedCell, float]:
        """Return its cell, resumed if the session is paused, and the seconds that this took."""
        if self._kept is None and not self._lost:
            return self._here, 0.0
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")
        began_at = time.monotonic()
        with self._turn:
            if self._lost:
                raise gone(self._lost, self._expired)
            if self._kept:
                self._resume(self._kept)
            return self._here, time.monotonic() - began_at

    def _resume(self, kept: "KeptState") -> None:
        age, claim = self._age, self._claim
        if age and not outlives(age, self._settings, self._here.cell.now()):
            self._end_paused(kept, _TOO_OLD, "expired", "lifetime_seconds")
            raise gone(_TOO_OLD, "lifetime_seconds")
        try:
            if claim and not claim.is_alive():
                raise launcher_ended()
            came = self._pausing().resume(
                kept.token, lambda *_: self._open_again(self._here, claim, self._bytes)
            )
        except PauseError as error:
            if error.is_final:
                self._end_paused(kept, f"it could not be resumed: {error.what}", "lost")
            raise
        if age:
            came.cell.take_age(age)
        self._adopt(came)
        self._here, self._kept = came, None
        self._release_claim()
        self._tell("resumed", "a request came")
        if came.cell.lost:  # before it was adopted
            came.release()

    def try_to_pause(self, why: str) -> bool:
        """Pause the session if nothing uses it; one that could not be paused is not tried again before
        its next use.  Return whether it is only busy for a moment."""
        used_at = self._here.cell.used_at
        if self._refused_at == used_at or not self._turn.acquire(blocking=False):
            return False
        try:
            if not self.is_paused and not self.lost and not self._is_wanted():
                self._pause_idle(why)
        except BusyError:
            return True
        except CellwrightError:  # it goes on as it was
            self._refused_at = used_at
        finally:
            self._turn.release()
        return False

    def _pause_idle(self, why: str) -> None:
        here = self._here
        size = here.cell.memory_bytes()
        with self._pausing().kept(here, is_use=False) as kept:
            self._age, self._bytes, self._kept = here.cell.age, size, kept
            self._claim = None if FIXED_ADDRESSES in here.plan.layers else here.cell.claim()
            is_over = False
            try:
                is_over = here.cell.end_unless_used(why, lambda: not self._is_wanted())
            finally:
                if not is_over:
                    self._kept = None
                    self._release_claim()
            if not is_over:
                raise PauseError("pause: a request came meanwhile")

    @property
    def is_evictable(self) -> bool:
        """Whether it could not be paused since its last use, and no call uses it or waits to."""
        return self._refused_at == self._here.cell.used_at and not self._wanted

    def _is_wanted(self) -> bool:
        return self._wanted > 0 or self._here.ports.are_open

    def pause(self) -> str:
        """Keep its state, end the session, and return the token; raises what `Session.pause` does."""
        why = "it was paused"
        with self._turn:
            if self._lost:
                raise gone(self._lost, self._expired)
            self._here.require_another_like_it()
            if kept := self._kept:
                token = self._pausing().give_away(kept)
                self._lost, self._kept = why, None
                self._release()
                return token
            with self._pausing().kept(self._here) as kept:
                self._here.cell.end(why, "paused")
            return kept.token

    def end(self, why: str, action: str = "closed") -> None:
        """End the session, and remove its state if it is paused; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        self._here.cell.end(why, action)
        with self._turn:
            if self._kept:
                self._end_paused(self._kept, why, action)
            else:
                self._here.cell.end(why, action)  # it came back meanwhile

    def _end_paused(self, kept: "KeptState", why: str, action: str, expired: str = "") -> None:
        self._lost, self._expired, self._kept = why, expired, None
        with contextlib.suppress(CellwrightError):  # the disk fails
            self._pausing().remove(kept)
        self._release()
        self._tell(action, why)

    def _release(self) -> None:
        self._release_claim()
        self._here.release()

    def _release_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim:
            claim.release()

"""`SessionClock`: the moments at which a session expires, stands still, or is to be looked at."""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..policies.policy import Limits
from .cells import MEMORY_LOOK_SECONDS, Cell
from .settings import SessionSettings

# At least so long between two looks at a session's CPU time: threads and children can exceed the
# limit by what they use in this time while no request runs.
_CPU_LOOK_SECONDS = 0.1


class SessionAge(NamedTuple):
    """What a paused session keeps of its clock."""

    born_at: float
    kept_until: float  # by `extend`


class SessionClock:
    """Moments are those of `now`, which is time.monotonic outside tests."""

    def __init__(self, settings: SessionSettings, limits: Limits, now: Callable[[], float]) -> None:
        self.settings = settings
        self.now = now
        self._limits = limits
        self._kept_until = 0.0
        self._born_at = self.used_at = now()
        self.freeze_at = self._born_at + settings.freeze_seconds
        self.cpu_look_at = self._born_at + limits.cpu_seconds / limits.cpus
        self.memory_look_at = self._born_at

    @property
    def age(self) -> SessionAge:
        return SessionAge(self._born_at, self._kept_until)

    def continue_from(self, age: SessionAge) -> None:
        """Let the session be as old as the one that it goes on from."""
        self._born_at, self._kept_until = age

    def note_use(self) -> None:
        self.used_at = self.now()
        self.freeze_at = self.used_at + self.settings.freeze_seconds

    def extend(self, seconds: float) -> None:
        """Let the session live for `seconds` from now at least."""
        self._kept_until = max(self._kept_until, self.now() + seconds)

    def complaint(self, cell: Cell, cpu_before: float) -> str:
        """Return why a session has to end that has used up its CPU time or memory, where a look at them
        is due; `cpu_before`: used in other cells."""
        if self.cpu_look_at <= self.now() and (why := self._look_at_cpu_time(cell, cpu_before)):
            return why
        return self._look_at_memory(cell) if self.memory_look_at <= self.now() else ""

    def _look_at_cpu_time(self, cell: Cell, cpu_before: float) -> str:
        limits, used = self._limits, cell.cgroup.cpu_seconds()
        if used is None:  # no cgroup counts: RLIMIT_CPU holds, for each process by itself
            self.cpu_look_at = math.inf
            return ""
        left = limits.cpu_seconds - used - cpu_before
        self.cpu_look_at = self.now() + max(left / limits.cpus, _CPU_LOOK_SECONDS)
        if left > 0:
            return ""
        return f"it used more than {limits.cpu_seconds:g} s of CPU time between two requests"

    def _look_at_memory(self, cell: Cell) -> str:
        patience = MEMORY_LOOK_SECONDS if cell.can_exceed else math.inf
        self.memory_look_at = self.now() + patience
        return "it needed more memory than it may, between two requests" * cell.has_exceeded()

    def expiry(self) -> tuple[float, str]:
        """Return when the session expires, and the setting that ends it then."""
        by_age = self._born_at + self.settings.lifetime_seconds, "lifetime_seconds"
        by_idleness = self.used_at + self.settings.idle_seconds, "idle_seconds"
        when, limit = min(by_age, by_idleness)
        return max(when, self._kept_until), limit

    def due_at(self, *, is_frozen: bool) -> float:
        """Return the moment at which there may be a reason to end the session."""
        expires_at = self.expiry()[0]
        if is_frozen:  # it uses no CPU time and no more memory
            return expires_at
        return min(expires_at, self.freeze_at, self.cpu_look_at, self.memory_look_at)


def outlives(age: SessionAge, settings: SessionSettings, now: float) -> bool:
    """Tell whether a paused session of that age may come back now: its lifetime goes on meanwhile."""
    return now < max(age.born_at + settings.lifetime_seconds, age.kept_until)

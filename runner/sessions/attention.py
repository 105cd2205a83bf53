"""`SessionAttention`: answers what threads and children of a session attempt between two requests.

Threads and children that a request left behind open files and attempt calls at any time; each waits
until somebody answers it.  During a request that is the supervision; between two requests it is one
thread for all sessions of a sandbox, which an epoll tells.
"""

import contextlib
import math
import select
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...policies.policy import Limits
from ..cells.cell import MEMORY_LOOK_SECONDS, Cell
from ..cells.held_cell import HeldCell
from ..listening.cell_listener import REST_SECONDS
from ..listening.locks import LOOK_SECONDS, Locks
from ..settings import SessionSettings

# Another thread closed the descriptor, or the epoll of all sessions, at the same moment.
_NO_LONGER_WATCHED = (FileNotFoundError, ValueError)
_AT_ONCE = 64  # answers before other sessions and a waiting request get their turn


class SessionAttention:
    """The listener of a session's cell, which an epoll reports unless it is paused; a cell without a
    listener needs no attention.

    `answer` is for the thread that polls; the rest for any that has the session's turn, or ends it.
    """

    def __init__(self, held: HeldCell) -> None:
        self.descriptor = held.cell.listener if held.listener else -1
        self.again_at = math.inf  # when to call `answer` even without an event, by time.monotonic
        self._listener = held.listener
        self._epoll: select.epoll | None = None  # while it is watched
        self._poll = select.poll()

    def begin(self, epoll: select.epoll) -> None:
        """Have `epoll` report when the session wants an answer."""
        if self._listener:
            self._epoll = epoll
            self._poll.register(self.descriptor, select.POLLIN)
            epoll.register(self.descriptor, select.EPOLLIN)

    @property
    def has_listener(self) -> bool:
        return self._listener is not None

    @contextlib.contextmanager
    def away(self, stays_away: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Keep the thread that answers away meanwhile, and afterwards if `stays_away`."""
        self._watch(0)
        try:
            yield
        finally:
            if not stays_away():
                self._watch(select.EPOLLIN)

    def answer(self) -> str:
        """Answer waiting calls; return how the cell broke a limit, "" if it did not."""
        self.again_at = math.inf
        if self._listener is None:
            return ""
        self._watch(select.EPOLLIN)  # it may have been at rest
        for _ in range(_AT_ONCE):
            event = next((event for _, event in self._poll.poll(0)), 0)
            if not event & select.POLLIN:
                if event:  # POLLHUP: nothing runs under the filter any more
                    self.close()
                break
            self._listener.answer()
            if self._listener.is_flooded:
                return "it attempted too many refused calls between two requests"
            if self._listener.needs_rest():
                self._watch(0)
                self.again_at = time.monotonic() + REST_SECONDS
                break
        return self._look_at_locks(self._listener.locks)

    def _look_at_locks(self, locks: Locks) -> str:
        complaint = locks.look_again() if locks.needs_look else ""
        if locks.needs_look:
            self.again_at = min(self.again_at, time.monotonic() + LOOK_SECONDS)
        return complaint

    def close(self) -> None:
        """Watch the listener no more; closing twice is fine."""
        epoll, self._epoll = self._epoll, None
        if epoll:
            with contextlib.suppress(*_NO_LONGER_WATCHED):
                epoll.unregister(self.descriptor)

    def _watch(self, events: int) -> None:
        if epoll := self._epoll:
            with contextlib.suppress(*_NO_LONGER_WATCHED):
                epoll.modify(self.descriptor, events)


# Shortest pause between two checks of a session's CPU time. Threads and children that run between
# requests can exceed the limit by this much.
_CPU_LOOK_SECONDS = 0.1


class SessionAge(NamedTuple):
    """The part of a session's clock that a paused session keeps."""

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
    def idle_seconds(self) -> float:
        """How long the session was not used."""
        return self.now() - self.used_at

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
        if used is None:  # without a cgroup only RLIMIT_CPU holds, for each process by itself
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

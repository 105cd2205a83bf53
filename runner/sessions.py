"""`Sessions`: the sessions of one sandbox, their number, their eviction, and what they attempt between
two requests."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from ..policies.errors import BusyError, CellwrightError, ClosedError
from ..policies.languages import PYTHON
from ..policies.policy import Limits
from .held_cell import HeldCell
from .session import SessionCell
from .settings import SessionSettings
from .threads import begin

_DAY = 86_400.0
_CLOSED = "the sandbox was closed"
_BREATH_SECONDS = 0.05  # between two looks at a session that is due but busy


class Sessions:
    """Counts the sessions of one sandbox, ends those that were idle or lived too long, or have used up
    their CPU time, and answers what threads and children of idle ones attempt."""

    def __init__(
        self, settings: SessionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._rested = threading.Condition()  # guards the next one
        self._rests = 0  # how often a session became idle or ended
        self._alive: list[SessionCell] = []
        self._by_listener: dict[int, SessionCell] = {}
        self._closed = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        try:
            self._thread = begin("cellwright-sessions", self._watch)
        except BaseException:
            self._free()
            raise

    def make_room(self, patience_seconds: float = 0.0) -> None:
        """Pause, or else evict, sessions that were idle longest while there are too many; raises
        BusyError if each is busy, and still is after `patience_seconds`."""
        until = time.monotonic() + patience_seconds
        seen = self._rests
        while not self._make_room():
            with self._rested:
                if self._rests == seen and not self._rested.wait(
                    max(0.0, until - time.monotonic())
                ):
                    raise self._busy()
                seen = self._rests

    def _make_room(self) -> bool:
        """Tell whether there is room; without the lock while sessions are paused, which takes long."""
        why = "it was idle longest, and another one was opened"
        for session in self._too_many():
            if session.try_to_pause(why) and not self._too_many():
                return True
        if not (self._settings.evict or self._settings.pauses):  # a state is never lost unasked
            return not self._too_many()
        for session in self._too_many():
            if session.may_evict() and session.try_to_evict(why) and not self._too_many():
                return True
        return not self._too_many()

    def _busy(self) -> BusyError:
        said = f"{len(self._alive)} sessions are alive"
        if self._settings.evict or self._settings.pauses:
            return BusyError(f"{said}, and each is busy", "close one, or let more live at once")
        return BusyError(
            f"{said}, as many as sessions.alive allows",
            "close one; or give SessionSettings another alive, pause_seconds to keep idle sessions on "
            "disk, or evict=True to end the one that was idle longest",
        )

    def _too_many(self) -> list[SessionCell]:
        """Return the sessions, idle longest first, if another one would be too many."""
        with self._lock:
            self._forget_the_lost()
            if len(self._alive) < self._settings.alive:
                return []
            return sorted(self._alive, key=lambda each: each.used_at)

    def note_rest(self) -> None:
        """Let the callers that wait for room try again."""
        with self._rested:
            self._rests += 1
            self._rested.notify_all()

    def admit(
        self, held: HeldCell, layers: tuple[str, ...], limits: Limits,
        give_back: Callable[[HeldCell], None], language: str = PYTHON,
    ) -> SessionCell:  # fmt: skip
        try:
            session = SessionCell(
                held, layers, limits, self._settings, give_back, language, self._clock
            )
            session.on_thaw = self.look_again
            session.on_rest = self.note_rest
        except BaseException:  # no caller would end the cell
            give_back(held)
            raise
        with self._lock:
            closed = self._closed
            if not closed:
                self._alive.append(session)
                self._by_listener[session.attention.begin(self._epoll)] = session
                os.eventfd_write(self._wake, 1)
        if closed:
            session.end(_CLOSED, "closed")
            raise ClosedError(_CLOSED)
        return session

    def count(self) -> tuple[int, int]:
        """Return how many sessions live, and how many of these are frozen."""
        with self._lock:
            self._forget_the_lost()
            return len(self._alive), sum(each.is_frozen for each in self._alive)

    def close(self) -> None:
        """End every session."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        for session in tuple(self._alive):
            with contextlib.suppress(CellwrightError):
                session.end(_CLOSED, "closed")
        self._free()

    def _free(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def look_again(self) -> None:
        """Have the thread look when each session is due: one may be due earlier than it was."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def _forget_the_lost(self) -> None:
        self._alive = [each for each in self._alive if not each.lost]
        self._by_listener = {n: each for n, each in self._by_listener.items() if not each.lost}

    def _watch(self) -> None:
        while not self._closed:
            patience = self._end_what_is_due()
            for descriptor, _ in self._epoll.poll(patience):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif session := self._by_listener.get(descriptor):
                    _attend(session)

    def _end_what_is_due(self) -> float:
        """End the sessions that are due, attend to those that asked for it, and return how many seconds
        later the next is due."""
        with self._lock:
            now = self._clock()
            for session in self._alive:
                if session.due_at() <= now:
                    # The session is gone in any case; this thread has to go on for the others.
                    with contextlib.suppress(Exception):
                        session.look()
                if session.attention.again_at <= now:
                    _attend(session)
            self._forget_the_lost()
            due = min((each.due_at() for each in self._alive), default=now + _DAY)
            again = min((each.attention.again_at for each in self._alive), default=now + _DAY)
            return max(0.0, min(max(_BREATH_SECONDS, due - now), again - now))


def _attend(session: SessionCell) -> None:
    """Answer what a session attempts; one whose listener cannot be answered is ended."""
    try:
        session.attend()
    except Exception as error:  # noqa: BLE001 - this thread has to go on for the others
        with contextlib.suppress(Exception):
            session.end(f"its refused calls could not be answered: {type(error).__name__}")

"""`Sessions`: the sessions of one sandbox, their number, their eviction, and answers to their calls
between two requests."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from ...policies.errors import BusyError, CellwrightError, ClosedError
from ...policies.policy import Limits
from ..cells.held_cell import HeldCell
from ..concurrency import begin_thread
from ..settings import SessionSettings
from .events import SessionEvents
from .session_cell import SessionCell

_DAY = 86_400.0
_CLOSED = "the sandbox was closed"
_BREATH_SECONDS = 0.05  # pause between two looks at a busy session that should end


class Sessions(SessionEvents):
    """Counts the sessions of one sandbox; ends those that were idle or lived too long, or used up
    their CPU time; answers calls of threads and children of idle sessions."""

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
            self._thread = begin_thread("cellwright-sessions", self._watch)
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

    def make_room_for_one(self) -> bool:
        """Have one session give up its cell, as `make_room` does when there are too many; tell whether
        one did."""
        with self._lock:
            most = len(self._alive)
        return self._make_room(most) if most else False

    def idle_since(self) -> float | None:
        """Return when the session that was idle longest was used last; None without a session."""
        with self._lock:
            self._forget_the_lost()
            return min((each.clock.used_at for each in self._alive), default=None)

    def _make_room(self, most: int | None = None) -> bool:
        """Tell whether there is room; without the lock while sessions are paused, which takes long."""
        why = "it was idle longest, and another one was opened"
        for session in self._too_many(most):
            if session.try_to_pause(why) and not self._too_many(most):
                return True
        if not (self._settings.evict or self._settings.pauses):  # no state is dropped unasked
            return not self._too_many(most)
        for session in self._too_many(most):
            if session.is_evictable and session.try_to_evict(why) and not self._too_many(most):
                return True
        return not self._too_many(most)

    def _busy(self) -> BusyError:
        return too_many_sessions(len(self._alive), self._settings)

    def _too_many(self, most: int | None = None) -> list[SessionCell]:
        with self._lock:
            self._forget_the_lost()
            if len(self._alive) < (self._settings.alive if most is None else most):
                return []
            return sorted(self._alive, key=lambda each: each.clock.used_at)

    def on_rest(self) -> None:
        """Let the callers that wait for room try again."""
        with self._rested:
            self._rests += 1
            self._rested.notify_all()

    def admit(
        self, held: HeldCell, limits: Limits, give_back: Callable[[HeldCell], None]
    ) -> SessionCell:
        try:
            session = SessionCell(held, limits, self._settings, give_back, self, self._clock)
        except BaseException:  # no caller would end the cell
            give_back(held)
            raise
        with self._lock:
            closed = self._closed
            if not closed:
                self._alive.append(session)
                self._by_listener[session.attention.descriptor] = session
                session.attention.begin(self._epoll)
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

    def on_thaw(self) -> None:
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
                    # The session is gone in any case, and this thread must go on for the others.
                    with contextlib.suppress(Exception):
                        session.look()
                if session.attention.again_at <= now:
                    _attend(session)
            self._forget_the_lost()
            due = min((each.due_at() for each in self._alive), default=now + _DAY)
            again = min((each.attention.again_at for each in self._alive), default=now + _DAY)
            return max(0.0, min(max(_BREATH_SECONDS, due - now), again - now))


def too_many_sessions(alive: int, settings: SessionSettings) -> BusyError:
    """Return the error for a session beyond `settings.alive`."""
    said = f"{alive} sessions are alive"
    if settings.evict or settings.pauses:
        return BusyError(f"{said}, and each is busy", "close one, or let more live at once")
    return BusyError(
        f"{said}, as many as sessions.alive allows",
        "close one; or give SessionSettings another alive, pause_seconds to keep idle sessions on "
        "disk, or evict=True to end the one that was idle longest",
    )


def _attend(session: SessionCell) -> None:
    """Answer a session's calls; end the session if its listener cannot be answered."""
    try:
        session.attend()
    except Exception as error:  # noqa: BLE001 - this thread has to go on for the others
        with contextlib.suppress(Exception):
            session.end(f"its refused calls could not be answered: {type(error).__name__}")

"""`Sessions`: the sessions of one sandbox, their number and their eviction."""

import contextlib
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
    """Counts the sessions of one sandbox, and ends those that were idle or lived too long, or have
    used up their CPU time."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._alive: list[SessionCell] = []
        self._closed = False
        self._thread = begin("cellwright-sessions", self._end_what_is_due)

    def make_room(self) -> None:
        """Evict the session that was idle longest if there are too many; raises BusyError."""
        with self._changed:
            self._forget_the_lost()
            for session in sorted(self._alive, key=lambda each: each.used_at):
                if len(self._alive) < self._settings.alive:
                    return
                session.try_to_evict("it was idle longest, and another one was opened")
                self._forget_the_lost()
            if len(self._alive) >= self._settings.alive:
                raise BusyError(
                    f"{len(self._alive)} sessions are alive, and each is busy",
                    "close one, or let more live at once",
                )

    def admit(
        self, held: HeldCell, layers: tuple[str, ...], limits: Limits,
        give_back: Callable[[HeldCell], None], language: str = PYTHON,
    ) -> SessionCell:  # fmt: skip
        try:
            session = SessionCell(held, layers, limits, self._settings, give_back, language)
        except BaseException:  # no caller would end the cell
            give_back(held)
            raise
        with self._changed:
            self._alive.append(session)
            self._changed.notify_all()
            closed = self._closed
        if closed:
            session.end(_CLOSED, "closed")
            raise ClosedError(_CLOSED)
        return session

    def close(self) -> None:
        """End every session."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for session in tuple(self._alive):
            with contextlib.suppress(CellwrightError):
                session.end(_CLOSED, "closed")

    def _forget_the_lost(self) -> None:
        self._alive = [each for each in self._alive if not each.lost]

    def _end_what_is_due(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for session in self._alive:
                    if session.due_at() <= now:
                        # The session is gone in any case; this thread has to go on for the others.
                        with contextlib.suppress(Exception):
                            session.look()
                self._forget_the_lost()
                soonest = min((each.due_at() for each in self._alive), default=now + _DAY)
                self._changed.wait(max(_BREATH_SECONDS, soonest - now))

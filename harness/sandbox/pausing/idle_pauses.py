"""`IdlePauses`: pauses the sessions of one sandbox that were idle for long, and those that were idle
longest while all of them take too much memory."""

import contextlib
import threading
from collections.abc import Callable

from ....runner.settings import SessionSettings
from ....runner.threads import begin
from ..returning_cell import ReturningCell

_DAY = 86_400.0
_LEAST_SECONDS = 0.05  # between two looks


class IdlePauses:
    """Safe from many threads; its own looks when a session is due, and after requests."""

    def __init__(self, settings: SessionSettings, sweep: Callable[[], None]) -> None:
        """`sweep` removes what earlier processes have left."""
        self._settings = settings
        self._sweep = sweep
        self._lock = threading.Lock()  # guards the next one
        self._sessions: list[ReturningCell] = []
        self._fitting = threading.Lock()
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, session: ReturningCell) -> None:
        """Look after a session until it has ended."""
        with self._lock:
            self._sessions.append(session)
            if self._thread is None:
                self._thread = begin("cellwright-pauses", self._watch)
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
            sizes = [(each, each.here.cell.memory_bytes()) for each in self._alive()]
            over = sum(size for _, size in sizes) + extra_bytes - most
            for session, size in sizes:
                if over <= 0:
                    return
                self._try_to_pause(session, "idle longest while all take more than memory_bytes")
                over -= size if session.is_paused else 0

    def look(self) -> float:
        """Pause what is due, and return the seconds until the next session is."""
        after, due = self._settings.pause_seconds, _DAY
        for session in self._alive() if after is not None else ():
            if (left := (after or 0.0) - session.here.cell.idle_seconds) <= 0:
                self._try_to_pause(session, f"it was idle for {after:g} s")
            if not session.is_paused:
                due = min(due, left if left > 0 else after or 0.0)
        self.make_room(0)
        return due

    def _try_to_pause(self, session: ReturningCell, why: str) -> None:
        if session.try_to_pause(why):
            self._wake.set()  # look again soon: nothing tells when it is not busy any more

    def _known(self) -> list[ReturningCell]:
        with self._lock:
            self._sessions = [each for each in self._sessions if not each.lost]
            return list(self._sessions)

    def _alive(self) -> list[ReturningCell]:
        """Return the sessions that have a cell, idle longest first."""
        alive = [each for each in self._known() if not each.is_paused]
        return sorted(alive, key=lambda each: each.here.cell.used_at)

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

"""`PreloadLearner`: has a launcher import ahead what the programs of a set of packages import."""

import threading

from ....policies.errors import CellwrightError
from ....runner.supervisor import Supervisor
from ....runner.threads import begin
from .modules import has_module, imports_of

_MOST_MODULES = 64
_MOST_PROGRAMS = 200  # that are looked at
_MOST_LAUNCHERS = 8  # that are started for it


class PreloadLearner:
    """Looks at the first programs of a set, and starts launchers that import what these import.

    A launcher that cannot import all of it ends the learning: the launcher before it stays.
    Safe from many threads.
    """

    def __init__(self, supervisor: Supervisor, directory: str) -> None:
        """`directory`: the set of packages, whose modules alone are learnt."""
        self._supervisor = supervisor
        self._directory = directory
        self._lock = threading.Lock()
        self._modules: dict[str, None] = {}
        self._programs = _MOST_PROGRAMS
        self._launchers = _MOST_LAUNCHERS
        self._thread: threading.Thread | None = None

    def look_at(self, code: str | bytes) -> None:
        """Learn from a program that has completed; a new launcher starts in the background."""
        if self._programs <= 0 or self._launchers <= 0:
            return
        text = code if isinstance(code, str) else code.decode("utf-8", "replace")
        named = {each for each in imports_of(text) if each not in self._modules}
        new = sorted(each for each in named if has_module(self._directory, each))
        with self._lock:
            self._programs -= 1
            room = max(0, _MOST_MODULES - len(self._modules))
            self._modules |= dict.fromkeys(new[:room])
            if new[:room] and self._thread is None and self._launchers > 0:
                self._thread = begin("cellwright-preload", self._preload)

    def _preload(self) -> None:
        """Start launchers until one has imported all that was learnt."""
        while True:
            with self._lock:
                modules = tuple(self._modules)
                self._launchers -= 1
            try:
                self._supervisor.preload(modules)
            except CellwrightError:  # it cannot import them, or was closed
                with self._lock:
                    self._launchers = 0
            with self._lock:
                if self._launchers <= 0 or len(self._modules) == len(modules):
                    self._thread = None
                    return

    def settle(self) -> None:
        """Wait until the launcher that has been started, if any, has taken over."""
        if thread := self._thread:
            thread.join()

    def close(self) -> None:
        """Start no more launchers, and wait until none is on its way."""
        with self._lock:
            self._launchers = 0
        self.settle()

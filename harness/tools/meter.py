"""How many calls of tools one caller may make, and how fast."""

import threading
import time
from collections.abc import Callable

from ...policies.errors import ToolBudgetExceeded


class Meter:
    """Counts the calls of one execution, or of one caller on the host.  Safe from many threads.

    A bucket of one second's worth of calls fills at `per_second`.
    """

    def __init__(
        self, most: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._made = 0
        self._room = max(1.0, per_second)
        self._looked_at = clock()

    def count(self) -> None:
        """Count a call; raises ToolBudgetExceeded if it is one too many, or too soon."""
        with self._lock:
            if self._made >= self._most:
                raise ToolBudgetExceeded(
                    f"{self._made} tools were called already",
                    "tools.calls of the policy bounds them",
                )
            self._fill()
            if self._room < 1.0:
                raise ToolBudgetExceeded(
                    f"more than {self._per_second:g} calls of tools a second",
                    "wait, or raise tools.calls_per_second of the policy",
                )
            self._made += 1
            self._room -= 1.0

    def _fill(self) -> None:
        now = self._clock()
        filled = self._room + (now - self._looked_at) * self._per_second
        self._room = min(max(1.0, self._per_second), filled)
        self._looked_at = now

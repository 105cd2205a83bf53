"""`Meter`: the budget and the rate limit of one caller's tool calls; refused calls count too."""

import threading
import time
from collections.abc import Callable

from ...policies.errors import ToolBudgetExceeded


class Meter:
    """Counts the calls of one execution, or of one caller on the host.  Safe from many threads.

    The rate limit is a token bucket that holds one second's calls and refills at `per_second`; 0
    allows no call.
    """

    def __init__(
        self, most: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._made = 0
        self._most_room = self._room = max(1.0, per_second) if per_second > 0 else 0.0
        self._looked_at = clock()
        self._refused = 0

    def count(self) -> None:
        """Count a call; raises ToolBudgetExceeded beyond the budget or the rate limit."""
        with self._lock:
            now = self._clock()
            filled = self._room + (now - self._looked_at) * self._per_second
            self._room = min(self._most_room, filled)
            self._looked_at = now
            if self._made < self._most and self._room >= 1.0:
                self._made += 1
                self._room -= 1.0
                return
            self._refused += 1
            exceeded = self._exceeded()
            exceeded.times = self._refused
            raise exceeded

    def _exceeded(self) -> ToolBudgetExceeded:
        if self._made >= self._most:
            return ToolBudgetExceeded(
                f"{self._made} calls of tools were made, as many as the policy allows",
                "raise tools.calls of the policy",
            )
        return ToolBudgetExceeded(
            f"more than {self._per_second:g} calls of tools a second",
            "wait, or raise tools.calls_per_second of the policy",
        )

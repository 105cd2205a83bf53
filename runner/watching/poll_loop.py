"""The parts of a poll loop: its interface to the objects that register with it, and its timeouts."""

import time
from collections.abc import Callable
from typing import Protocol

_LONGEST_WAIT_SECONDS = 86_400.0  # poll(2) counts milliseconds in an int, which ends after 24 days


class Watcher(Protocol):
    """A poll loop over descriptors."""

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events that poll(2) reports for `descriptor`."""

    def unwatch(self, descriptor: int) -> None:
        """Stop watching `descriptor`; harmless if it is not watched."""

    def complain(self, complaint: str) -> None:
        """End the cell because its guest broke the protocol."""


class Timers:
    """Actions and their moments, by time.monotonic; an action has one moment at a time."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], float] = {}

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Call `do` at `moment` instead of at its earlier moment."""
        self._due[do] = moment

    def patience_milliseconds(self) -> float:
        """Return the time until the next action, as poll(2) takes it."""
        patience = _LONGEST_WAIT_SECONDS
        if self._due:
            patience = min(min(self._due.values()) - time.monotonic(), patience)
        return max(0.0, patience) * 1000 + 1

    def ring(self) -> None:
        """Call every action that is due, the earliest first."""
        now = time.monotonic()
        for do in sorted(
            (do for do, at in self._due.items() if at <= now), key=self._due.__getitem__
        ):
            del self._due[do]
            do()

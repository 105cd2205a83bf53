"""The parts of a poll loop: its interface to the objects that register with it, and its timeouts."""

import math
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
    """Actions and their moments, by time.monotonic; an action has one moment at a time.

    What has happened before a moment is handled before its action: poll(2) has been asked for events
    since then.  Otherwise a process that was stopped, or whose callback took long, would end a program
    for a timeout although it had ended in time.
    """

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], float] = {}
        self._asked = 0.0  # when poll(2) was asked for events
        self._first = 0.0  # the earliest moment then

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Call `do` at `moment` instead of at its earlier moment."""
        self._due[do] = moment

    def patience_milliseconds(self) -> float:
        """Return the time until the next action, as poll(2), which is asked next, takes it."""
        self._asked = time.monotonic()
        self._first = first = min(self._due.values(), default=math.inf)
        if first <= self._asked:
            return 0.0
        return min(first - self._asked, _LONGEST_WAIT_SECONDS) * 1000 + 1

    def ring(self) -> None:
        """Call every action that was due before poll(2) was asked, the earliest first."""
        if self._first > self._asked:
            return
        for do in sorted(
            (do for do, at in self._due.items() if at <= self._asked), key=self._due.__getitem__
        ):
            del self._due[do]
            do()

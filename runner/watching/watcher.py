"""A poll loop as those see it who take part in it."""

from collections.abc import Callable
from typing import Protocol


class Watcher(Protocol):
    """Whose poll loop it is."""

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Have `handler` called with what poll(2) tells of `descriptor`."""

    def unwatch(self, descriptor: int) -> None:
        """Wait for it no longer; it need not be watched."""

    def complain(self, complaint: str) -> None:
        """End the cell: it has done what no honest guest does."""

"""`Watcher`: the interface of a poll loop to the objects that register with it."""

from collections.abc import Callable
from typing import Protocol


class Watcher(Protocol):
    """A poll loop over descriptors."""

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events that poll(2) reports for `descriptor`."""

    def unwatch(self, descriptor: int) -> None:
        """Stop watching `descriptor`; harmless if it is not watched."""

    def complain(self, complaint: str) -> None:
        """End the cell because its guest broke the protocol."""

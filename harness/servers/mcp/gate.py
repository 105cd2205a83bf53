"""How many requests of one client, and of all, are at work or wait for it."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from mcp import MCPError

from .clients import Owner

BUSY = -32000  # of the codes that JSON-RPC leaves to servers
_MOST, _MOST_OF_ONE = 512, 128


class Gate:
    """Lets requests in while there is room; the others are refused, which costs next to nothing."""

    def __init__(self, most: int = _MOST, most_of_one: int = _MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()

    @contextlib.contextmanager
    def room_for(self, owner: Owner) -> Iterator[None]:
        """Count a request meanwhile; raises MCPError if it is one too many."""
        with self._lock:
            if self._inside[owner.client] >= self._most_of_one:  # in all of its conversations
                raise MCPError(BUSY, f"{self._most_of_one} requests of this client are at work")
            if self._inside.total() >= self._most:
                raise MCPError(BUSY, "too many requests are at work")
            self._inside[owner.client] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[owner.client] -= 1
                self._inside += Counter()  # forgets who has none

"""How much of something clients hold at once, each and together: bytes of bodies, or requests."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

MIB = 1024 * 1024


class Weights:
    """Counts from before the body of a request is read until the request is answered."""

    def __init__(self, most: int = 256 * MIB, most_of_one: int = 128 * MIB) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, client: str, size: int) -> Iterator[bool]:
        """Tell whether there is room for so much more, and count it meanwhile if so."""
        with self._lock:
            fits = (
                self._held[client] + size <= self._most_of_one
                and self._held.total() + size <= self._most
            )
            size = size if fits else 0
            self._held[client] += size
        try:
            yield fits
        finally:
            with self._lock:
                self._held[client] -= size

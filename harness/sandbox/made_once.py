"""`MadeOnce`: a part of a sandbox that is made when it is first used."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ...policies.errors import ClosedError


class _Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closeable)


class MadeOnce(Generic[T]):
    """Makes one part when it is first asked for it, so that a sandbox without use for it imports
    nothing of it; safe from many threads."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._is_closed = False
        self.made: T | None = None  # None until then

    def get(self) -> T:
        """Return the part; raises ClosedError if it was not made before `close`."""
        with self._lock:
            if self.made is None:
                if self._is_closed:
                    raise ClosedError("the sandbox was closed")
                self.made = self._make()
            return self.made

    def close(self) -> None:
        """Close the part, if there is one, and make none any more."""
        with self._lock:
            self._is_closed = True
        if self.made:
            self.made.close()

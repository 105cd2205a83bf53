"""`LendingCache`: objects that take long to make, such as sandboxes, kept for the next caller."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from ...policies.errors import ClosedError


class Lendable(Protocol):
    """Something that is made once, and used by many calls until it is closed."""

    def settle(self) -> None: ...

    def close(self) -> None: ...


_T = TypeVar("_T", bound=Lendable)


class _Shared(Generic[_T]):
    """Something that is lent, and the number of calls that use it."""

    def __init__(self, lent: _T) -> None:
        self.lent = lent
        self.users = 0
        self.is_wanted = True


class LendingCache(Generic[_T]):
    """Lends things by key, and evicts the least recently used ones.

    `most`: the total weight of kept objects; by default each weighs 1. The last used one is kept
    whatever it weighs. One that is in use when it is evicted is closed once it is returned. Safe from
    many threads. A ClosedError names the `owner`.
    """

    def __init__(self, most: int, owner: str, weigh: Callable[[_T], int] = lambda _: 1) -> None:
        self._most = most
        self._owner = owner
        self._weigh = weigh
        self._lock = threading.Lock()
        self._shared: OrderedDict[Hashable, _Shared[_T]] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._shared)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._shared

    def __iter__(self) -> Iterator[_T]:
        """Yield the kept objects, the least recently used first."""
        with self._lock:
            shared = list(self._shared.values())
        return iter([each.lent for each in shared])

    @contextlib.contextmanager
    def lend(self, key: Hashable, make: Callable[[], _T]) -> Iterator[_T]:
        """Lend the object of `key` for one call; `make` makes it if it is missing.

        Raises ClosedError, and what `make` raises.
        """
        shared = self._take(key, make)
        try:
            yield shared.lent
        finally:
            self._give_back(shared)

    def _take(self, key: Hashable, make: Callable[[], _T]) -> _Shared[_T]:
        surplus = []
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._owner} was closed")
            is_new = key not in self._shared
            if is_new:
                self._shared[key] = _Shared(make())
            self._shared.move_to_end(key)
            shared = self._shared[key]
            shared.users += 1
            if is_new:
                surplus = self._surplus()
        for each in surplus:
            self._close_unused(each)
        return shared

    def evict(self) -> None:
        """Evict objects beyond the limit, after one has become heavier."""
        with self._lock:
            surplus = self._surplus()
        for each in surplus:
            self._close_unused(each)

    def _surplus(self) -> list[_Shared[_T]]:
        """Evict the least recently used ones; one that is in use is closed once it is returned."""
        weights = {key: self._weigh(each.lent) for key, each in self._shared.items()}
        found = []
        while len(self._shared) > 1 and sum(weights.values()) > self._most:
            key, evicted = self._shared.popitem(last=False)
            del weights[key]
            evicted.is_wanted = False
            found.append(evicted)
        return found

    def _give_back(self, shared: _Shared[_T]) -> None:
        with self._lock:
            shared.users -= 1
        if not shared.is_wanted:
            self._close_unused(shared)

    def _close_unused(self, shared: _Shared[_T]) -> None:
        with self._lock:
            in_use = shared.users > 0
        if not in_use:
            shared.lent.close()

    def settle(self) -> None:
        """Wait until the pool of each is full."""
        with self._lock:
            shared = list(self._shared.values())
        for each in shared:
            each.lent.settle()

    def close(self) -> None:
        """End every call and close everything; closing twice is fine."""
        with self._lock:
            self._closed = True
            shared, self._shared = list(self._shared.values()), OrderedDict()
        for each in shared:
            each.lent.close()

"""`SandboxCache`: making a sandbox takes a tenth of a second, executing in it a few milliseconds."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from ...policies.errors import ClosedError
from .sandbox import Sandbox


class _Shared:
    """A sandbox and the number of calls that use it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.users = 0
        self.is_wanted = True


class SandboxCache:
    """Lends at most `most` sandboxes by key, and evicts the least recently used one.

    One that is in use when it is evicted is closed once it is returned.  Safe from many threads.
    A ClosedError names the `owner`.
    """

    def __init__(self, most: int, owner: str) -> None:
        self._most = most
        self._owner = owner
        self._lock = threading.Lock()
        self._shared: OrderedDict[Hashable, _Shared] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._shared)

    @contextlib.contextmanager
    def lend(self, key: Hashable, make: Callable[[], Sandbox]) -> Iterator[Sandbox]:
        """Lend the sandbox of `key` for one call; `make` makes a missing one.

        Raises ClosedError, and what `make` raises.
        """
        shared = self._take(key, make)
        try:
            yield shared.sandbox
        finally:
            self._give_back(shared)

    def _take(self, key: Hashable, make: Callable[[], Sandbox]) -> _Shared:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._owner} was closed")
            if key not in self._shared:
                self._shared[key] = _Shared(make())
            self._shared.move_to_end(key)
            shared = self._shared[key]
            shared.users += 1
            surplus = self._surplus()
        for each in surplus:
            self._close_unused(each)
        return shared

    def _surplus(self) -> list[_Shared]:
        """Evict the least recently used ones; one that is in use is closed once it is returned."""
        found = []
        while len(self._shared) > self._most:
            found.append(self._shared.popitem(last=False)[1])
            found[-1].is_wanted = False
        return found

    def _give_back(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
        if not shared.is_wanted:
            self._close_unused(shared)

    def _close_unused(self, shared: _Shared) -> None:
        with self._lock:
            in_use = shared.users > 0
        if not in_use:
            shared.sandbox.close()

    def settle(self) -> None:
        """Wait until the pool of each sandbox is full."""
        with self._lock:
            shared = list(self._shared.values())
        for each in shared:
            each.sandbox.settle()

    def close(self) -> None:
        """End every call and close every sandbox; closing twice is fine."""
        with self._lock:
            self._closed = True
            shared, self._shared = list(self._shared.values()), OrderedDict()
        for each in shared:
            each.sandbox.close()

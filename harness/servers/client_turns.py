"""`ClientTurns`: limits the work at once of each client and of all together; the rest waits.
`run_in_thread`: work that blocks, without a line of waiting requests for all clients."""

import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


async def run_in_thread(
    work: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments
) -> _Result:
    """Return what `work` returns in a thread of its own.

    anyio's default has 40 threads for all clients, which one of them could hold.  The limits of a
    client's requests bound the number of these.
    """
    return await anyio.to_thread.run_sync(work, *arguments, limiter=anyio.CapacityLimiter(1))


class ClientTurns:
    """Limits the work at once, such as threads, for one event loop.

    A free turn goes to the waiting client that holds the fewest turns: a client that waits with many
    requests is not served before one that waits with a single one.
    """

    def __init__(self, per_client: int, total: int) -> None:
        self._per_client = per_client
        self._total = total
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[anyio.Event]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a turn of the client, and hold it during the block."""
        await self._take(client)
        try:
            yield
        finally:
            self._give_back(client)

    def held_by(self, client: Hashable) -> int:
        """Return the number of turns that a client holds."""
        return self._held[client]

    async def _take(self, client: Hashable) -> None:
        if self._held.total() < self._total and self._held[client] < self._per_client:
            self._held[client] += 1
            return
        its_turn = anyio.Event()
        self._waiting.setdefault(client, deque()).append(its_turn)
        try:
            await its_turn.wait()
        except BaseException:  # cancelled
            if its_turn.is_set():
                self._give_back(client)
            else:
                self._leave(client, its_turn)
            raise

    def _give_back(self, client: Hashable) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        ready = [each for each in self._waiting if self._held[each] < self._per_client]
        if ready:
            following = min(ready, key=self._held.__getitem__)
            its_turn = self._waiting[following][0]
            self._leave(following, its_turn)
            self._held[following] += 1
            its_turn.set()

    def _leave(self, client: Hashable, its_turn: anyio.Event) -> None:
        self._waiting[client].remove(its_turn)
        if not self._waiting[client]:
            del self._waiting[client]

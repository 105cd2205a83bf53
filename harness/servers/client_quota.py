"""`ClientQuota`: a limit for each client and one for all together; `HeldAmount`: what one request holds
of it.  `client_turns.py` has limits for work that waits."""

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterator

from ...policies.errors import QuotaExceeded


class ClientQuota:
    """Counts `what` (such as connections, or bytes) for each client; safe from many threads.

    `per_client` is the limit of one client, `total` that of all clients together.  `hint` is added to
    the error; `holder` is what the error calls a client.
    """

    def __init__(
        self, what: str, per_client: int, total: int, hint: str = "", holder: str = "client"
    ) -> None:
        self._what = what
        self._per_client = per_client
        self._total = total
        self._hint = hint
        self._holder = holder
        self._lock = threading.Lock()
        self._held: Counter[Hashable] = Counter()

    def take(self, client: Hashable, amount: int = 1) -> None:
        """Count `amount` more for a client; beyond a limit raises QuotaExceeded and counts nothing."""
        with self._lock:
            if self._held[client] + amount > self._per_client:
                limit = f"{self._per_client} for each {self._holder}"
            elif self._held.total() + amount > self._total:
                limit = f"{self._total} for all {self._holder}s together"
            else:
                self._held[client] += amount
                return
            self._forget_if_none(client)
        raise QuotaExceeded(f"too many {self._what}: at most {limit}", self._hint, limit=self._what)

    def give_back(self, client: Hashable, amount: int = 1) -> None:
        """Count `amount` less for a client."""
        with self._lock:
            self._held[client] -= amount
            self._forget_if_none(client)

    @contextlib.contextmanager
    def held(self, client: Hashable, amount: int = 1) -> Iterator[None]:
        """Count `amount` more during the block; raises QuotaExceeded before it."""
        self.take(client, amount)
        try:
            yield
        finally:
            self.give_back(client, amount)

    def _forget_if_none(self, client: Hashable) -> None:
        """Drop the entry of a client that holds nothing: clients come and go without bound."""
        if not self._held[client]:
            del self._held[client]


class HeldAmount:
    """What one request of a client holds of a quota until the end of the block."""

    def __init__(self, quota: ClientQuota, client: Hashable) -> None:
        self._quota = quota
        self._client = client
        self._amount = 0

    def __enter__(self) -> "HeldAmount":
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.give_back(self._client, self._amount)
        self._amount = 0

    def grow_to(self, amount: int) -> None:
        """Hold `amount` in all, if it holds less; raises QuotaExceeded and holds what it held."""
        if amount > self._amount:
            self._quota.take(self._client, amount - self._amount)
            self._amount = amount

"""`KeptAnswers`: the answers to requests with an Idempotency-Key, so that a retry does nothing twice.

The same key with the same body gets the same answer, also while the first request is at work.
An answer is kept for a while, in memory.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable

import anyio
from starlette.responses import Response

from .problems import RequestRefused

_KEPT_SECONDS = 600.0
_MOST_OF_ONE, _MOST = 256, 4096  # answers
_MOST_BYTES_OF_ONE, _MOST_BYTES = 16 * 1024 * 1024, 64 * 1024 * 1024
_BUSY = 429


class _KeptAnswer:
    """One key: `response` is None while the first request is at work, and if it was not answered."""

    def __init__(self, client: str, digest: bytes) -> None:
        self.client = client
        self.digest = digest
        self.done = anyio.Event()
        self.response: Response | None = None
        self.until = float("inf")

    @property
    def size(self) -> int:
        """The bytes of the answer."""
        return len(self.response.body) if self.response else 0


class KeptAnswers:
    """Answers by client, place and key; the oldest ones of a client, then of all, make room."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[Hashable, _KeptAnswer] = {}

    async def answer(
        self, client: str, key: Hashable, data: bytes, perform: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return the kept answer, or that of `perform`; raises RequestRefused for another body.

        An answer that says that nothing was done, as the server was busy or failed, is not kept.
        """
        whole, digest = (client, key), hashlib.sha256(data).digest()
        while True:
            self._forget_expired()
            entry = self._entries.get(whole)
            if entry is None:
                return await self._first(whole, _KeptAnswer(client, digest), perform)
            if entry.digest != digest:
                words = "Idempotency-Key: this key was used with another body"
                raise RequestRefused(409, "conflict", words, "use a new key")
            await entry.done.wait()
            if entry.response:
                return entry.response

    async def _first(
        self, whole: Hashable, entry: _KeptAnswer, perform: Callable[[], Awaitable[Response]]
    ) -> Response:
        self._entries[whole] = entry
        try:
            response = await perform()
            if response.status_code != _BUSY and response.status_code < 500:
                entry.response = response
                entry.until = self._clock() + _KEPT_SECONDS
        finally:
            entry.done.set()
            if entry.response is None:
                del self._entries[whole]
        self._make_room(entry.client)
        return response

    def _forget_expired(self) -> None:
        """Drop what is too old: answers are kept in the order in which their requests came."""
        now = self._clock()
        for key in [key for key, each in self._entries.items() if each.until <= now]:
            del self._entries[key]

    def _make_room(self, client: str) -> None:
        self._drop_oldest(lambda entry: entry.client == client, _MOST_OF_ONE, _MOST_BYTES_OF_ONE)
        self._drop_oldest(lambda entry: True, _MOST, _MOST_BYTES)

    def _drop_oldest(
        self, counts: Callable[[_KeptAnswer], bool], most: int, most_bytes: int
    ) -> None:
        kept = {key: each for key, each in self._entries.items() if each.response and counts(each)}
        number, size = len(kept), sum(each.size for each in kept.values())
        for key, each in kept.items():
            if number <= most and size <= most_bytes:
                return
            del self._entries[key]
            number, size = number - 1, size - each.size

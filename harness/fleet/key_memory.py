"""`KeyMemory`: the calls that a node has begun, by key, and the outcomes of the latest."""

import threading
from collections import OrderedDict

_KEYS_PER_OUTCOME = 10  # keys without an outcome that are kept beside each one with


class KeptCall:
    """A call that has begun; `outcome` is None until `is_over` is set, and empty once forgotten."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.outcome: bytes | None = None
        self.is_over = threading.Event()


class KeyMemory:
    """Remembers at most `most` outcomes of at most `most_bytes` together; safe from many threads.

    An older call is remembered without its outcome, so that it is not run again either.  Of those,
    ten times `most` are kept; a call that runs is never forgotten.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._running: dict[str, KeptCall] = {}
        self._kept: OrderedDict[str, KeptCall] = OrderedDict()
        self._forgotten: OrderedDict[str, KeptCall] = OrderedDict()
        self._bytes = 0

    def begin(self, key: str, digest: bytes) -> tuple[KeptCall, bool]:
        """Return the call of that key, and whether it is new and has begun now."""
        with self._lock:
            for calls in (self._running, self._kept, self._forgotten):
                if known := calls.get(key):
                    return known, False
            call = self._running[key] = KeptCall(digest)
            return call, True

    def end(self, key: str, outcome: bytes) -> None:
        """Keep the outcome of a call that `begin` returned as new, and wake those who wait for it."""
        with self._lock:
            call = self._running.pop(key)
            call.outcome = outcome
            self._kept[key] = call
            self._bytes += len(outcome)
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._forget_the_oldest()
        call.is_over.set()

    def undo(self, key: str, outcome: bytes) -> None:
        """Forget a call of which nothing has run; only calls that wait for it get the outcome."""
        with self._lock:
            call = self._running.pop(key)
            call.outcome = outcome
        call.is_over.set()

    def _forget_the_oldest(self) -> None:
        key, oldest = self._kept.popitem(last=False)
        self._bytes -= len(oldest.outcome or b"")
        forgotten = self._forgotten[key] = KeptCall(oldest.digest)
        forgotten.outcome = b""
        forgotten.is_over.set()
        while len(self._forgotten) > self._most * _KEYS_PER_OUTCOME:
            self._forgotten.popitem(last=False)

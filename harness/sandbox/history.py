"""`History`: the calls of a session, so that a fork can replay them."""

import copy
import hashlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...policies.errors import PolicyError
from ...runner.result import SandboxResult

_MOST_BYTES = 64 * 1024 * 1024
_CALL_BYTES = 500  # the memory of a call without arguments
_NUMBER_BYTES = 32
_KEPT = ("stdin", "inputs", "files", "env", "timeout")


class PastCall(NamedTuple):
    """One call of a session, its arguments, and a digest of its outcome."""

    code: str | bytes
    given: dict[str, Any]
    outcome: bytes


class History:
    """The calls of a session in order; dropped once they exceed 64 MiB, and a fork is then refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, PastCall | None] = {}  # by execution, in the order in which they ran
        self._left = _MOST_BYTES

    def begin(self, execution_id: str) -> None:
        """Note that this execution runs now, which fixes its place: calls may wait in other threads."""
        with self._lock:
            self._calls[execution_id] = None

    def add(self, code: str | bytes, given: dict[str, Any], result: SandboxResult) -> None:
        # A copy: the caller may change the arguments afterwards.
        kept = {name: _copied(given[name]) for name in _KEPT if given.get(name) is not None}
        with self._lock:
            self._left -= len(code) + _size(kept) + _CALL_BYTES
            self._calls[result.execution_id] = PastCall(code, kept, outcome_of(result))
            if self._left < 0:
                self._calls.clear()

    def calls(self) -> tuple[PastCall, ...]:
        """Return the calls that have ended; raises PolicyError if they were too large to keep."""
        with self._lock:
            if self._left < 0:
                raise PolicyError(
                    f"fork: the calls of this session take more than {_MOST_BYTES} bytes",
                    "snapshot() and restore() copy its files to another session",
                )
            return tuple(call for call in self._calls.values() if call)


def _copied(given: Any) -> Any:
    return copy.deepcopy(dict(given) if isinstance(given, Mapping) else given)


def _size(given: Any) -> int:
    """Return about how many bytes an argument takes."""
    if isinstance(given, str | bytes):
        return len(given)
    if isinstance(given, Mapping):
        return sum(_size(key) + _size(value) for key, value in given.items())
    if isinstance(given, list | tuple):
        return sum(map(_size, given))
    return _NUMBER_BYTES


def outcome_of(result: SandboxResult) -> bytes:
    """Return a digest of the parts of a result that a faithful replay repeats."""
    words = (result.status.value, result.value, result.stdout, result.stderr, result.error)
    return hashlib.sha256(repr(words).encode(errors="surrogatepass")).digest()

"""What a session was asked, so that another can be brought to the same state."""

import copy
import hashlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...policies.errors import PolicyError
from ...runner.result import SandboxResult

_MOST_BYTES = 64 * 1024 * 1024
_CALL_BYTES = 500  # of a call that was given nothing, in our memory
_NUMBER_BYTES = 32
_KEPT = ("stdin", "inputs", "files", "env", "timeout")


class Call(NamedTuple):
    """One call, what it was given, and what came of it."""

    code: str | bytes
    given: dict[str, Any]
    outcome: bytes


class History:
    """The calls of a session in their order, up to a size; past that, none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, Call | None] = {}  # by execution, in the order in which they ran
        self._left = _MOST_BYTES

    def begin(self, execution_id: str) -> None:
        """Note that it is this one's turn: calls may be waiting in other threads."""
        with self._lock:
            self._calls[execution_id] = None

    def add(self, code: str | bytes, given: dict[str, Any], result: SandboxResult) -> None:
        # A copy: the caller may go on to change what was given.
        kept = {name: _copied(given[name]) for name in _KEPT if given.get(name) is not None}
        with self._lock:
            self._left -= len(code) + _size(kept) + _CALL_BYTES
            self._calls[result.execution_id] = Call(code, kept, outcome_of(result))
            if self._left < 0:
                self._calls.clear()

    def calls(self) -> tuple[Call, ...]:
        """Return those that have ended; raises PolicyError if they were too large to keep."""
        with self._lock:
            if self._left < 0:
                raise PolicyError(
                    f"fork: this session was given more than {_MOST_BYTES} bytes to replay",
                    "take a snapshot of its files instead",
                )
            return tuple(call for call in self._calls.values() if call)


def _copied(given: Any) -> Any:
    return copy.deepcopy(dict(given) if isinstance(given, Mapping) else given)


def _size(given: Any) -> int:
    """Return about how large a value is that a call was given."""
    if isinstance(given, str | bytes):
        return len(given)
    if isinstance(given, Mapping):
        return sum(_size(key) + _size(value) for key, value in given.items())
    if isinstance(given, list | tuple):
        return sum(map(_size, given))
    return _NUMBER_BYTES


def outcome_of(result: SandboxResult) -> bytes:
    """Return a digest of what is compared to tell whether a replay went the same way."""
    words = (result.status.value, result.value, result.stdout, result.stderr, result.error)
    return hashlib.sha256(repr(words).encode(errors="surrogatepass")).digest()

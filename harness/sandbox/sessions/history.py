"""`History`: the calls of a session, so that a fork can replay them."""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from ....policies.digest import digest
from ....policies.errors import PolicyError
from ....runner.concurrency import NEVER
from ....runner.requests.result import SandboxResult
from ..parameters import CallArguments

_MOST_BYTES = 64 * 1024 * 1024
_CALL_BYTES = 500  # the memory of a call without arguments
_NUMBER_BYTES = 32
_NONE: tuple[()] = ()  # the default of many arguments
_UNCHANGEABLE = (str, bytes, int, float, type(None))
# A replay leaves these out.
_ONCE = {"collect": (), "trace_id": None, "on_output": None, "cancel": NEVER}


class PastCall(NamedTuple):
    """One call of a session, its arguments, and a digest of its outcome."""

    given: CallArguments
    outcome: bytes
    is_ok: bool = True


class History:
    """The calls of a session in order; dropped once they exceed 64 MiB, and a fork is then refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, PastCall | None] = {}  # calls by execution, in order
        self._left = _MOST_BYTES
        self._gone = ""  # why the history has no calls

    def forget(self, why: str) -> None:
        """Drop the calls; `calls` says `why` from now on."""
        with self._lock:
            self._calls.clear()
            self._gone = why

    def shrink(self, most_bytes: int) -> None:
        """Drop the calls if they take more than `most_bytes`: the session is paused."""
        if _MOST_BYTES - self._left > most_bytes:
            self.forget(
                f"pause: the calls of a session are kept while it is paused up to {most_bytes} bytes"
            )

    def begin(self, execution_id: str) -> None:
        """Note that this execution runs now, which fixes its place: calls may wait in other threads."""
        with self._lock:
            self._calls[execution_id] = None

    def add(self, given: CallArguments, result: SandboxResult) -> None:
        # A copy: the caller may change the arguments afterwards.
        given = replace(given, **_ONCE)
        kept = {name: _copied(value) for name, value in asdict(given).items()}
        with self._lock:
            self._left -= sum(_size(each) for each in kept.values() if each) + _CALL_BYTES
            self._calls[result.execution_id] = PastCall(
                CallArguments(**kept), outcome_of(result), result.ok
            )
            if self._left < 0:
                self._calls.clear()

    def order(self) -> tuple[str, ...]:
        """Return the executions in the order in which they began."""
        with self._lock:
            return tuple(self._calls)

    def sort(self, order: Sequence[str]) -> None:
        """Put the calls into the order in which they began in another process."""
        with self._lock:
            self._calls = {each: self._calls.pop(each) for each in order if each in self._calls} | (
                self._calls
            )

    def copy(self) -> "History":
        """Return a history of its own that begins with these calls."""
        other = History()
        with self._lock:
            other._calls, other._left = dict(self._calls), self._left
            other._gone = self._gone
        return other

    def calls(self) -> tuple[PastCall, ...]:
        """Return the calls that have ended; raises PolicyError if they were too large to keep."""
        with self._lock:
            if self._gone:
                raise PolicyError(self._gone, "snapshot() and restore() copy its files")
            if self._left < 0:
                raise PolicyError(
                    f"fork, save_skill: the calls of this session take more than {_MOST_BYTES} bytes",
                    "snapshot() and restore() copy its files to another session",
                )
            return tuple(call for call in self._calls.values() if call)


def _copied(given: Any) -> Any:
    if given is _NONE or isinstance(given, _UNCHANGEABLE):
        return given
    return copy.deepcopy(dict(given) if isinstance(given, Mapping) else given)


def _size(given: Any) -> int:
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
    return digest(repr(words).encode(errors="surrogatepass"))


def replay(
    calls: Sequence[PastCall], execute: Callable[[CallArguments], SandboxResult]
) -> tuple[int, ...]:
    """Repeat the calls; return the numbers, counted from 1, of those with another outcome."""
    return tuple(
        number
        for number, call in enumerate(calls, 1)
        if outcome_of(execute(call.given)) != call.outcome
    )

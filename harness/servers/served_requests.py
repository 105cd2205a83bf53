"""`KeptAnswers`: the answers to requests with a key, so that a repeated request does nothing twice; and
`CancellableExecuting`: an execution that ends with the request of its client.  `plain` makes values of
programs into JSON that every client can parse.
"""

import json
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.concurrency import NEVER
from ...runner.requests.request import OnOutput
from ...runner.requests.result import SandboxResult
from ..sandbox.calls.executing import Executing
from ..sandbox.parameters import CallArguments

_T = TypeVar("_T")
_ALL = object()  # the owner of the totals


class KeptLimits(NamedTuple):
    """How many answers are kept, and their bytes."""

    number: int
    bytes: int


class KeptAnswer(Generic[_T]):
    """The answer to the first request with a key; `digest` is of that request.

    `answer` is not done while that request is at work; then it has the answer, None if there is none.
    """

    def __init__(self, key: Hashable, digest: bytes, owner: Hashable) -> None:
        self.key = key
        self.digest = digest
        self.owner = owner
        self.answer: Future[_T | None] = Future()
        self.size = 0
        self.until = 0.0  # set when the request ends


class KeptAnswers(Generic[_T]):
    """Answers by key; safe from many threads.

    Beyond the limits of one owner, or of all, the oldest make room.  `most_forgotten` of those are
    still known as requests that began, without an answer.
    """

    def __init__(
        self, size: Callable[[_T], int], most: KeptLimits, most_of_one: KeptLimits | None = None, *,
        seconds: float = float("inf"), most_forgotten: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._size = size
        self._most = most
        self._most_of_one = most_of_one or most
        self._seconds = seconds
        self._most_forgotten = most_forgotten
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Hashable, KeptAnswer[_T]] = {}  # kept ones in the order of their ends
        self._forgotten: dict[Hashable, KeptAnswer[_T]] = {}
        self._numbers: Counter[object] = Counter()  # by owner, as the next
        self._bytes: Counter[object] = Counter()

    def begin(
        self, key: Hashable, digest: bytes, owner: Hashable = None
    ) -> tuple[KeptAnswer[_T], bool]:
        """Return the entry of a key, and whether it is new: then the caller carries out the request and
        calls `end`."""
        with self._lock:
            while (oldest := self._oldest(_ALL)) and oldest.until <= self._clock():
                self._drop(oldest)
            if known := self._entries.get(key) or self._forgotten.get(key):
                return known, False
            entry = self._entries[key] = KeptAnswer(key, digest, owner)
            return entry, True

    def kept(self, key: Hashable) -> _T | None:
        """Return the answer of a key; None if there is none, not yet or no more."""
        with self._lock:
            entry = self._entries.get(key)
            is_there = entry is not None and entry.until > self._clock()
            return entry.answer.result() if entry and is_there else None

    def end(self, key: Hashable, answer: _T | None, *, is_kept: bool = True) -> None:
        """Give the answer to waiting requests, and keep it. If it is not kept, the next request with
        the key is the first again."""
        with self._lock:
            entry = self._entries.pop(key)
            if is_kept:
                entry.size = 0 if answer is None else self._size(answer)
                entry.until = self._clock() + self._seconds
                self._entries[key] = entry
                self._count(entry, 1)
                for owner, most in ((entry.owner, self._most_of_one), (_ALL, self._most)):
                    while self._numbers[owner] > most.number or self._bytes[owner] > most.bytes:
                        self._forget_oldest(owner)
        entry.answer.set_result(answer)

    def _oldest(self, owner: object) -> KeptAnswer[_T] | None:
        """Return the answer of an owner that was kept first."""
        mine = (each for each in self._entries.values() if owner in (_ALL, each.owner))
        return next((each for each in mine if each.until), None)

    def _count(self, entry: KeptAnswer[_T], number: int) -> None:
        for owner in (entry.owner, _ALL):
            self._numbers[owner] += number
            self._bytes[owner] += number * entry.size
            if not self._numbers[owner]:
                del self._numbers[owner], self._bytes[owner]

    def _drop(self, entry: KeptAnswer[_T]) -> None:
        del self._entries[entry.key]
        self._count(entry, -1)

    def _forget_oldest(self, owner: object) -> None:
        if not (oldest := self._oldest(owner)):
            return
        self._drop(oldest)
        if self._most_forgotten:
            known = KeptAnswer[_T](oldest.key, oldest.digest, oldest.owner)
            known.answer.set_result(None)
            self._forgotten[known.key] = known
            if len(self._forgotten) > self._most_forgotten:
                del self._forgotten[next(iter(self._forgotten))]


_MAX_DEPTH = 64  # serializers and parsers fail somewhere beyond


def plain(value: Any) -> Any:
    """Return a value unchanged if every client can parse it, else as text."""
    try:
        if _is_flat(value):
            json.dumps(value, allow_nan=False)
            return value
        return json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return ascii(type(value).__name__)


def _is_flat(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += each.values()
            elif isinstance(each, list | tuple):
                inside += each
        if not inside:
            return True
        level = inside
    return False


class CancellableExecuting(Executing):
    """Executes through another Executing; an execution also ends once `stop` is readable.

    `on_output` gets its output in place of the caller's.
    """

    def __init__(self, executing: Executing, stop: int, on_output: OnOutput | None = None) -> None:
        self._executing = executing
        self._stop = stop
        self._on_output = on_output

    def has_tool(self, name: str) -> bool:
        return self._executing.has_tool(name)

    def _execute(self, given: CallArguments) -> SandboxResult:
        """Carry out a call; it ends with the request, or once its own `cancel` is readable."""
        with _either(given.cancel, self._stop) as stop:
            on_output = self._on_output or given.on_output
            return self._executing._execute(replace(given, on_output=on_output, cancel=stop))

    def close(self) -> None:
        """Close the wrapped Executing."""
        self._executing.close()


@contextmanager
def _either(first: int, second: int) -> Iterator[int]:
    if first == NEVER:
        yield second
        return
    with select.epoll() as both:
        both.register(first, select.EPOLLIN)
        both.register(second, select.EPOLLIN)
        yield both.fileno()


def refuse_packages(policy: Policy, packages: Sequence[str], server: str = "server") -> None:
    """Refuse packages under a policy that names none: a client chooses only among those that the owner
    of the server allows."""
    if packages and not policy.packages.allow:
        raise PolicyError(
            f"packages: the {server}'s policy {policy.name!r} allows clients none",
            "its owner lists them in packages.allow of the policy",
        )

"""Nodes in this process, which answer for a `CellNode` and fail where a test tells them to."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from cellwright.harness.fleet.cell_node import (
    Answered,
    NodeAway,
    NodeCall,
    NodeGone,
    NotBegun,
    message_of,
)
from cellwright.harness.sandbox.remote.call_frames import failure_of
from cellwright.harness.sandbox.remote.frames import Execute, ExecuteArguments, Executed
from cellwright.policies.errors import BusyError
from cellwright.runner.messages import encode
from cellwright.runner.requests.result import SandboxResult, SandboxStatus

# What becomes of one message: answered; refused before it began; the node dies before or after it ran
# the program; the connection breaks before or after.
FATES = ("ok", "full", "dies_before", "dies_after", "away_before", "away_after")


def program(number: int) -> Execute:
    return Execute(b"%d" % number, True, "python", ExecuteArguments())


def value_of(reply: object) -> int:
    assert isinstance(reply, Executed), reply
    return int(reply.value)


class FakeNode:
    """Runs `program(n)` by answering n, and counts what it ran by that number."""

    def __init__(
        self, name: str, fates: Iterable[str] = (), before: Callable[[], object] = lambda: None
    ) -> None:
        self.name = name
        self.ran: Counter[int] = Counter()
        self.most_at_once = 0
        self._fates = deque(fates)
        self._before = before
        self._lock = threading.Lock()
        self._answers: dict[str, bytes] = {}
        self._at_once = 0
        self._is_dead = False

    def ask(self, data: bytes, timeout: float) -> bytes:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._before()
            return self._answer(message_of(data, NodeCall))
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, call: NodeCall) -> bytes:
        assert isinstance(call.request, Execute)
        with self._lock:
            fate = self._fates.popleft() if self._fates else "ok"
            if self._is_dead or fate == "dies_before":
                self._is_dead = True
                raise NodeGone("killed")
            if fate == "away_before":
                raise NodeAway("reset")
            if fate == "full" and call.key not in self._answers:
                return encode(NotBegun(failure_of(BusyError("full"))))
            if call.key not in self._answers:
                self.ran[int(call.request.code)] += 1
                result = SandboxResult(status=SandboxStatus.COMPLETED, reason="exit")
                self._answers[call.key] = encode(Answered(Executed(result, call.request.code)))
            if fate == "dies_after":
                self._is_dead = True
                raise NodeGone("killed")
            if fate == "away_after":
                raise NodeAway("reset")
            return self._answers[call.key]

    def close(self) -> None:
        self._is_dead = True

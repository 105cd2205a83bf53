"""`Replay`: matches the recorded calls of a run with the calls of its program when it runs again.

A call is identified by its site in the program, its tool and its arguments; equal calls are
interchangeable.  The order in which calls arrive does not matter: calls that are open at the same time
arrive in any order.  The order of the answers does: see `RecordedCall.after`.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ...runner.messages import Answer


class RecordedCall(NamedTuple):
    """A call in the record of a run.

    `begun` without an `answer` means that its outcome is unknown; neither means that it waited for
    approval and was not made.  `after` is the number of answers that the program had when the call
    arrived, `place` the position of its own answer among all answers, from 1; 0 without an answer.
    """

    number: int
    site: str
    digest: str  # digest of the tool and its arguments
    tool: str
    begun: bool
    answer: Answer | None
    after: int = 0
    place: int = 0
    may_be_repeated: bool = False
    call: str = ""  # its identity within the run
    arguments: msgspec.Raw = msgspec.Raw(b"{}")  # JSON
    tool_digest: str = ""  # `ToolSpec.digest` of the tool that was called

    @property
    def has_effect(self) -> bool:
        """Tell whether it was or may have been made, so that another call in its place could repeat its
        effect."""
        return self.begun and not self.may_be_repeated

    @property
    def needs_tool(self) -> bool:
        """Tell whether a program that makes the call again needs the tool: a refused call may be one of
        a tool that never existed."""
        return self.begun or self.answer is None or not self.answer.kind


class Replay:
    """The recorded calls that the program has not made again so far.  The caller holds the lock."""

    def __init__(self, recorded: Iterable[RecordedCall]) -> None:
        self._missing: dict[str, dict[str, deque[RecordedCall]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self._afters: list[int] = []
        self._taken: Counter[int] = Counter()  # values in `_afters` whose calls have arrived
        for each in recorded:
            self._missing[each.site][each.digest].append(each)
            heapq.heappush(self._afters, each.after)

    def take(self, site: str, digest: str) -> RecordedCall | None:
        """Return the recorded call that matches, and take it out; None if the call is new."""
        equals = self._missing.get(site, {}).get(digest)
        if not equals:
            return None
        taken = equals.popleft()
        self._taken[taken.after] += 1
        return taken

    def releasable(self) -> float:
        """Return the place up to which answers can be given.

        Every call that arrived before these answers in the record has arrived again.
        """
        while self._afters and self._taken[self._afters[0]]:
            self._taken[heapq.heappop(self._afters)] -= 1
        return self._afters[0] if self._afters else math.inf

    def conflicts(self, site: str) -> list[RecordedCall]:
        """Return the missing calls of a site whose effect a new call there could repeat."""
        return [each for each in self._left_at(site) if each.has_effect]

    def left(self) -> tuple[str, ...]:
        """Return the calls that the program did not make again."""
        return tuple(
            f"{site}: {each.tool}" for site in self._missing for each in self._left_at(site)
        )

    def _left_at(self, site: str) -> list[RecordedCall]:
        return [each for equals in self._missing.get(site, {}).values() for each in equals]

"""The recorded calls of a run, matched with the calls that its program makes when it runs again.

A call is known by its site in the program, its tool and its arguments.  Equal calls are
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
    """A call that is on record.

    `begun` without an `answer`: its outcome is unknown.  Neither: it waited for approval, and was not
    made.  `after` is the number of answers that the program had when the call arrived, `place` the
    position of its own answer among all answers, from 1; 0 without one.
    """

    number: int
    site: str
    digest: str  # of its tool and arguments
    tool: str
    begun: bool
    answer: Answer | None
    after: int = 0
    place: int = 0
    may_be_repeated: bool = False
    call: str = ""  # its identity within the run
    arguments: msgspec.Raw = msgspec.Raw(b"{}")  # JSON

    @property
    def has_effect(self) -> bool:
        """Tell whether it was made, or may have been, and making another call in its place could
        do the same thing twice."""
        return self.begun and not self.may_be_repeated


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
        """Return this call as it is on record, None if it is new."""
        equals = self._missing.get(site, {}).get(digest)
        if not equals:
            return None
        taken = equals.popleft()
        self._taken[taken.after] += 1
        return taken

    def releasable(self) -> float:
        """Return the place up to which answers can be given: every call that arrived before such an
        answer on record has arrived again."""
        while self._afters and self._taken[self._afters[0]]:
            self._taken[heapq.heappop(self._afters)] -= 1
        return self._afters[0] if self._afters else math.inf

    def in_the_way(self, site: str) -> list[RecordedCall]:
        """Return the missing calls of a site for which a new call there could be a second one."""
        return [each for each in self._left_at(site) if each.has_effect]

    def left(self) -> tuple[str, ...]:
        """Return the calls that were not made again: the program took another way."""
        return tuple(
            f"{site}: {each.tool}" for site in self._missing for each in self._left_at(site)
        )

    def _left_at(self, site: str) -> list[RecordedCall]:
        return [each for equals in self._missing.get(site, {}).values() for each in equals]

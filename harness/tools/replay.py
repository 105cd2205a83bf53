"""What a program called and what came of it, so that it can be run again up to where it was.

A call is known by where in the program it stands, by its tool and arguments, and among equals by its
turn.  So programs that call several tools at once find their own answers again.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ...policies.errors import ToolDiverged
from ...runner.messages import Answer


class Recorded(NamedTuple):
    """A call of before.  Without an `answer` nobody knows what came of it, if it had `begun`; if not,
    it waited, and was not made."""

    number: int
    site: str
    digest: str  # of its tool and arguments
    tool: str
    begun: bool
    answer: Answer | None


class Replay:
    """The calls that a program made before, each of which it may make once more."""

    def __init__(self, recorded: Iterable[Recorded]) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, list[Recorded]] = defaultdict(list)
        for each in recorded:
            self._left[each.site].append(each)

    def take(self, site: str, digest: str, tool: str) -> Recorded | None:
        """Return this call as it was made before, None if it was not.

        Raises ToolDiverged where others were made at this place and are still to come.
        """
        with self._lock:
            left = self._left.get(site, [])
            for each in left:
                if each.digest == digest:
                    left.remove(each)
                    return each
            if left:
                expected = ", ".join(sorted({each.tool for each in left}))
                said = f"{site}: {tool} is called where before it was {expected}"
                raise ToolDiverged(said, tool=tool)
            return None

    def left(self) -> tuple[str, ...]:
        """Return the calls that were not made again: a sign that the program went another way."""
        with self._lock:
            return tuple(
                f"{each.site}: {each.tool}" for left in self._left.values() for each in left
            )

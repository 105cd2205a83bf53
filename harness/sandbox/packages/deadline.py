"""`Deadline`: the moment by which a set of packages has to be there, and what ends the wait earlier."""

import math
import time

from ....policies.errors import PackageError
from ....runner.concurrency import NEVER


class Deadline:
    """Bounds the time in which a set is resolved, fetched and built.

    `seconds`: from now on; default without end.  `cancel`: a descriptor; once it is readable, the
    caller has given up.
    """

    def __init__(self, seconds: float = math.inf, cancel: int = NEVER) -> None:
        self.seconds = seconds
        self.cancel = cancel
        self._at = time.monotonic() + seconds

    def left(self, most: float = math.inf) -> float:
        """Return the seconds that are left, at most `most`; raises PackageError if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.passed()
        return min(left, most)

    def passed(self) -> PackageError:
        """Return the error of what did not end in time."""
        return PackageError(
            f"the set of packages was not built within {self.seconds:g} s, the timeout of the call",
            "build it ahead with `cellwright env build`, or allow more time",
        )


NO_DEADLINE = Deadline()

"""`Budget`: how much work the host may do on what somebody untrusted wrote.

Whatever parses, checks, matches or renders hostile input on the host takes a Budget and spends steps as
it works: before a piece of work, in proportion to what that piece can cost at most.  A budget ends by
its steps, which are the same on every machine, by a deadline, or once the caller has given up.
"""

import contextvars
import time

from ..policies.errors import BudgetExceeded
from .channel import has_news
from .concurrency import NEVER

# A descriptor that is readable once the caller of the running tool has given up.
CANCEL: contextvars.ContextVar[int] = contextvars.ContextVar("cancel", default=NEVER)

STEPS_PER_SECOND = 2_000_000  # a step stands for half a microsecond of Python
_LOOK_EVERY = 10_000  # steps between two looks at the clock and the descriptor: about 5 ms


class Budget:
    """Steps, a deadline and a descriptor that cancels.  For one thread at a time.

    `what` names the work in the error.  `seconds` count from now; `cancel` is a descriptor that is
    readable once the caller has given up.  A budget that is part of another spends of both.
    """

    def __init__(
        self, what: str, steps: float, *, seconds: float = float("inf"), cancel: int = NEVER,
        whole: "Budget | None" = None,
    ) -> None:  # fmt: skip
        self.what = what
        self.spent = 0
        self._steps = steps
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._cancel = cancel
        self._whole = whole
        self._look_at = 0  # steps: the first step looks

    def part(self, what: str, steps: float) -> "Budget":
        """Return a budget of so many steps for a part of the work, which ends with this one."""
        return Budget(what, steps, whole=self)

    def spend(self, steps: int = 1) -> None:
        """Count work that is about to be done; raises BudgetExceeded if it may not be."""
        if self._whole is not None:
            self._whole.spend(steps)
        self.spent += steps
        if self.spent > self._steps:
            raise BudgetExceeded(f"{self.what} takes more than {self._steps:.0f} steps")
        if self.spent >= self._look_at:
            self._look_at = self.spent + _LOOK_EVERY
            self.look()

    def look(self) -> None:
        """Look at the clock and the descriptor; raises BudgetExceeded."""
        if self._whole is not None:
            self._whole.look()
        if self._cancel >= 0 and has_news(self._cancel):
            raise BudgetExceeded(f"{self.what} was cancelled by the caller", cause="cancelled")
        if time.monotonic() > self._deadline:
            message = f"{self.what} takes longer than {self._seconds:g} s"
            raise BudgetExceeded(message, cause="wall_time")

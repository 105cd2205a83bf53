"""`SessionAttention`: answers what threads and children of a session attempt between two requests."""

import contextlib
import math
import select
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .held_cell import HeldCell

if TYPE_CHECKING:
    from .watching.between_requests import BetweenRequests


class SessionAttention:
    """Does nothing for a cell without a listener."""

    def __init__(self, held: HeldCell) -> None:
        self._held = held
        self._between: BetweenRequests | None = None

    @property
    def has_listener(self) -> bool:
        return self._between is not None

    def begin(self, epoll: select.epoll) -> int:
        """Have `epoll` report when the session wants an answer; return the descriptor, -1 for none."""
        if self._held.listener:
            from .watching.between_requests import BetweenRequests  # not for single-use cells

            self._between = BetweenRequests(epoll, self._held.cell.listener, self._held.listener)
        return self._between.descriptor if self._between else -1

    @property
    def again_at(self) -> float:
        """The moment, by time.monotonic, at which to answer even without news."""
        return self._between.again_at if self._between else math.inf

    def answer(self) -> str:
        """Answer, and return why the session is to be ended, if it is; no request runs."""
        return self._between.answer() if self._between else ""

    @contextlib.contextmanager
    def away(self, stays_away: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Keep the thread that answers away meanwhile, and afterwards if `stays_away`."""
        if self._between:
            self._between.pause()
        try:
            yield
        finally:
            if self._between and not stays_away():
                self._between.resume()

    def close(self) -> None:
        if self._between:
            self._between.close()

"""`BetweenRequests`: the listener of a session's cell while no request of the session runs.

Threads and children that a request left behind open files and attempt calls at any time; each waits
until somebody answers it.  During a request that is the supervision; between two requests it is one
thread for all sessions of a sandbox, which an epoll tells.
"""

import contextlib
import math
import select
import time

from .listener import REST_SECONDS, Listener
from .locks import LOOK_SECONDS

# Another thread has closed it in the same moment, or the epoll with all sessions.
_NO_LONGER_WATCHED = (FileNotFoundError, ValueError)
_AT_ONCE = 64  # answers before other sessions, and a request of this one, get their turn


class BetweenRequests:
    """A listener that an epoll reports unless it is paused.

    `answer` is for the thread that polls; the rest for any that has the session's turn, or ends it.
    """

    def __init__(self, epoll: select.epoll, descriptor: int, listener: Listener) -> None:
        self.descriptor = descriptor
        self.again_at = math.inf  # when to call `answer` even without news, by time.monotonic
        self._epoll = epoll
        self._listener = listener
        self._is_watched = True
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        epoll.register(descriptor, select.EPOLLIN)

    def pause(self) -> None:
        """Leave the listener to the supervision of a request."""
        self._watch(0)

    def resume(self) -> None:
        """Take the listener back."""
        self._watch(select.EPOLLIN)

    def answer(self) -> str:
        """Answer what waits; return how the cell broke a limit, "" if it did not."""
        self.again_at = math.inf
        self.resume()  # it may have been at rest
        for _ in range(_AT_ONCE):
            event = next((event for _, event in self._poll.poll(0)), 0)
            if not event & select.POLLIN:
                if event:  # POLLHUP: nothing runs under the filter any more
                    self.close()
                break
            self._listener.answer()
            if self._listener.is_flooded:
                return "it attempted too many refused calls between two requests"
            if self._listener.needs_rest():
                self.pause()
                self.again_at = time.monotonic() + REST_SECONDS
                break
        return self._look_at_locks()

    def _look_at_locks(self) -> str:
        locks = self._listener.locks
        complaint = locks.look_again() if locks.needs_look else ""
        if locks.needs_look:
            self.again_at = min(self.again_at, time.monotonic() + LOOK_SECONDS)
        return complaint

    def close(self) -> None:
        """Watch the listener no more; closing twice is fine."""
        if self._is_watched:
            self._is_watched = False
            with contextlib.suppress(*_NO_LONGER_WATCHED):
                self._epoll.unregister(self.descriptor)

    def _watch(self, events: int) -> None:
        if self._is_watched:
            with contextlib.suppress(*_NO_LONGER_WATCHED):
                self._epoll.modify(self.descriptor, events)

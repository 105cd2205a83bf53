"""`Giver`: gives descriptors to callers that wait in the listener of one cell.

The kernel has the giver wait until the caller takes its descriptor (SECCOMP_IOCTL_NOTIF_ADDFD), which
the caller does when it runs next.  A guest that gives a caller little processor time (SCHED_IDLE,
beside processes that take all of it) makes that last minutes, so a thread gives: deadlines, limits
and other cells do not wait meanwhile.  The end of the cell ends the wait.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..kernel import notifications
from ..kernel.notifications import Notification

Give = Callable[[Notification, int, int], None]
_MOST_WAITING = 256
_END_SECONDS = 1.0


class Giver:
    """The thread that gives, from the first descriptor on."""

    def __init__(self, listener: int) -> None:
        self._listener = listener
        self._waiting: SimpleQueue[tuple[Notification, int, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, notification: Notification, descriptor: int, flags: int) -> None:
        """Have the call return `descriptor`, which is closed here then; `flags`: O_CLOEXEC or 0."""
        if self._waiting.qsize() >= _MOST_WAITING or not self._begin():
            os.close(descriptor)
            notifications.refuse(self._listener, notification, errno.EAGAIN)
        else:
            self._waiting.put((notification, descriptor, flags))

    def close(self) -> None:
        """End the thread; the cell has ended."""
        self._waiting.put(None)
        if self._thread:
            self._thread.join(_END_SECONDS)

    def _begin(self) -> bool:
        """Return whether the thread runs, which it may not for want of threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while given := self._waiting.get():
            hand_over(self._listener, *given)


def hand_over(listener: int, notification: Notification, descriptor: int, flags: int) -> None:
    """Give at once, or refuse; `descriptor` is closed afterwards."""
    try:
        notifications.answer_with(listener, notification, descriptor, flags)
    except OSError as error:  # the guest may have no more descriptors
        with contextlib.suppress(OSError):
            notifications.refuse(listener, notification, error.errno or errno.EMFILE)
    finally:
        os.close(descriptor)

"""A thread that waits in a system call: its memory is read and written, and it is given descriptors.

The guest chooses the content of its memory, and another thread may change it meanwhile. So it serves
the record and never a decision about the guest (a door grants only what every guest may ask for). A
host that forbids it (no ptrace right over the guest) reads nothing.
"""

import contextlib
import errno
import os
import threading
from _queue import SimpleQueue  # `queue` takes longer to import
from collections.abc import Callable

from ..kernel import notifications
from ..kernel.notifications import Notification

TEXT_BYTES = 256
_PAGE = 4096


def text_at(thread: int, address: int, most: int = TEXT_BYTES) -> bytes:
    """Read a C string of at most `most` bytes, a page or less; "" if it cannot be read."""
    first = min(most, _PAGE - address % _PAGE)  # the next page may not be mapped
    data = bytes_at(thread, address, first)
    if len(data) == first < most and b"\0" not in data:
        data += bytes_at(thread, address + first, most - first)
    return data.partition(b"\0")[0]


def bytes_at(thread: int, address: int, length: int) -> bytes:
    """Read at most `length` bytes; empty if they cannot be read."""
    if not 0 < address < 2**63:
        return b""
    try:
        memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(memory, length, address)
    except OSError:
        return b""
    finally:
        os.close(memory)


def write_bytes(listener: int, notification: Notification, address: int, data: bytes) -> bool:
    """Write `data` into the memory of the caller; return False if that cannot be done.

    The memory is opened before the kernel is asked whether the call still waits. So it is the caller's,
    and not that of a process that has taken its number (seccomp_unotify(2)).
    """
    if not 0 < address < 2**63:
        return False
    try:
        memory = os.open(f"/proc/{notification.thread}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        is_waiting = notifications.is_waiting(listener, notification)
        return is_waiting and os.pwrite(memory, data, address) == len(data)
    except OSError:
        return False
    finally:
        os.close(memory)


Give = Callable[[Notification, int, int], None]
_MOST_WAITING = 256
_END_SECONDS = 1.0


class Giver:
    """The thread that gives descriptors to callers that wait in the listener of one cell.

    The kernel has the giver wait until the caller takes its descriptor (SECCOMP_IOCTL_NOTIF_ADDFD),
    which the caller does when it runs next. A guest can make this take minutes, by giving the caller
    little processor time (SCHED_IDLE beside busy processes). So a thread of its own hands over:
    deadlines, limits and other cells do not wait. The end of the cell ends the wait.
    """

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

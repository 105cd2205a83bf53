"""Reads and writes the memory of a thread that waits in a system call.

The content is the guest's choice, and another thread may change it meanwhile: it serves the record,
never a decision about the guest (doors.py grants only what the guest may ask for).  A host that
forbids it (no ptrace right over the guest) reads nothing.
"""

import os

from ..kernel import notifications
from ..kernel.notifications import Notification

TEXT_BYTES = 256
_PAGE = 4096


def text_at(thread: int, address: int) -> bytes:
    """Read a C string of at most TEXT_BYTES; "" if there is none."""
    first = min(TEXT_BYTES, _PAGE - address % _PAGE)  # the next page may not be mapped
    data = bytes_at(thread, address, first)
    if len(data) == first < TEXT_BYTES and b"\0" not in data:
        data += bytes_at(thread, address + first, TEXT_BYTES - first)
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

    The memory is opened before the kernel is asked whether the call still waits: so it is that of the
    caller, and not of a process that has its number by now (seccomp_unotify(2)).
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

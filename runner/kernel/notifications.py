"""The supervisor's end of a seccomp listener (seccomp_unotify(2))."""

import contextlib
import errno
import fcntl
import struct
from typing import NamedTuple

_RECV = 0xC0502100  # _IOWR('!', 0, struct seccomp_notif)
_SEND = 0xC0182101  # _IOWR('!', 1, struct seccomp_notif_resp)
_ID_VALID = 0x40082102  # _IOW('!', 2, __u64)
_ADD_DESCRIPTOR = 0x40182103  # _IOW('!', 3, struct seccomp_notif_addfd)
_SET_FLAGS = 0x40082104  # _IOW('!', 4, __u64), Linux 6.6
_SYNC_WAKE_UP = 1
_CONTINUE = 1
_AND_ANSWER = 2  # SECCOMP_ADDFD_FLAG_SEND, Linux 5.14: the call returns the new descriptor
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_ID = struct.Struct("=Q")
_DESCRIPTOR = struct.Struct("=QIIII")
_NOTHING = bytes(_NOTIFICATION.size)


class Notification(NamedTuple):
    """A system call that waits for an answer.  `thread` may be used while `is_waiting` says so."""

    id: int
    thread: int  # thread id in this process's pid namespace
    number: int
    arguments: tuple[int, ...]


def wake_in_sync(listener: int) -> None:
    """Have the caller and us take turns on one CPU where the kernel can: 6 instead of 14 µs a call
    (measured)."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)


def is_listener(descriptor: int) -> bool:
    """Tell whether it is the listener of a filter: only such a file answers that it has no call 0."""
    try:
        fcntl.ioctl(descriptor, _ID_VALID, _ID.pack(0))
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


def receive(listener: int) -> Notification | None:
    """Take the next notification; None if the caller died meanwhile."""
    buffer = bytearray(_NOTHING)  # the kernel refuses a buffer that is not zeroed
    try:
        fcntl.ioctl(listener, _RECV, buffer, True)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    identity, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return Notification(identity, thread, number, tuple(arguments))


def is_waiting(listener: int, notification: Notification) -> bool:
    """Tell whether the call still waits, and so whether `thread` still is its caller."""
    try:
        fcntl.ioctl(listener, _ID_VALID, _ID.pack(notification.id))
    except OSError:
        return False
    return True


def refuse(listener: int, notification: Notification, number: int) -> None:
    """Have the call fail with errno `number`."""
    _send(listener, _RESPONSE.pack(notification.id, 0, -number, 0))


def let_go_on(listener: int, notification: Notification) -> None:
    """Have the kernel execute the call as if there were no listener."""
    _send(listener, _RESPONSE.pack(notification.id, 0, 0, _CONTINUE))


def succeed(listener: int, notification: Notification, value: int = 0) -> None:
    """Have the call return `value` without being made."""
    _send(listener, _RESPONSE.pack(notification.id, value, 0, 0))


def answer_with(listener: int, notification: Notification, descriptor: int, flags: int) -> bool:
    """Answer the call with a copy of `descriptor`; `flags`: O_CLOEXEC or 0.  Return False if the caller
    is gone.  Raises OSError if the caller may have no more descriptors."""
    wanted = _DESCRIPTOR.pack(notification.id, _AND_ANSWER, descriptor, 0, flags)
    try:
        fcntl.ioctl(listener, _ADD_DESCRIPTOR, wanted)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def _send(listener: int, response: bytes) -> None:
    try:
        fcntl.ioctl(listener, _SEND, response)
    except OSError as error:
        if error.errno != errno.ENOENT:  # ENOENT: the thread died, or a signal interrupted the call
            raise


def int32(argument: int) -> int:
    """Return the C int that a register holds."""
    return (argument & 0xFFFFFFFF) - ((argument & 0x80000000) << 1)

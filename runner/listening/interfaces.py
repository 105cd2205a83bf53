"""Questions of a cell about the interfaces of its own network: netlink sockets (rtnetlink(7)), and
requests of ioctl(2) (netdevice(7)).

No cgroup counts the messages that wait at a netlink socket, 210 KiB (measured, Linux 6.18), so a cell
has few sockets at a time. The kernel makes and counts a socket after the answer. So a thread that was
answered counts as having one more, until it is seen to have gone on.

The kernel answers a request for the network namespace in which the socket was made, and some sockets
of a cell are made by the supervisor, in the host's.  So the answers are made here: a cell has `lo`.
"""

import errno
import os
import struct

from ..kernel import notifications
from ..kernel.notifications import Notification
from .waiting_call import bytes_at, write_bytes

_MOST = 16
TOO_MANY = f"netlink: a cell has at most {_MOST} sockets at a time"
_LONG_NS = 1_000_000  # ns of running; the call takes some thousands
_NAME = struct.Struct("=16si")  # struct ifreq: a name, or what is asked of it
_LOOPBACK = 1  # LOOPBACK_IFINDEX, in every network namespace
_CONF = struct.Struct("=i4xQ")  # struct ifconf: how long a buffer of struct ifreq is, and where
_IFREQ_BYTES = 40
_SIOCGIFNAME, _SIOCGIFCONF, _SIOCETHTOOL = 0x8910, 0x8912, 0x8946
_ADDRESS = struct.pack("=HH4s8x", 2, 0, b"\x7f\0\0\1")  # struct sockaddr_in: AF_INET, 127.0.0.1
_OF_LOOPBACK = {
    0x8915: _ADDRESS,  # SIOCGIFADDR
    0x8919: struct.pack("=H14x", 2),  # SIOCGIFBRDADDR: 0.0.0.0, as lo has none
    0x891B: struct.pack("=HH4s8x", 2, 0, b"\xff\0\0\0"),  # SIOCGIFNETMASK
    0x8927: struct.pack("=H14x", 772),  # SIOCGIFHWADDR: ARPHRD_LOOPBACK, and no address
    0x8913: struct.pack("=h", 0x49),  # SIOCGIFFLAGS: IFF_UP, IFF_LOOPBACK, IFF_RUNNING
    0x8921: struct.pack("=i", 65536),  # SIOCGIFMTU
    0x8933: struct.pack("=i", _LOOPBACK),  # SIOCGIFINDEX
}


class NetlinkSockets:
    """The sockets of one cell, including those that its threads may be about to make."""

    def __init__(self) -> None:
        self._answered: dict[int, int] = {}  # thread -> how long it had run when it was answered

    def may_have_another(self, thread: int, call: int) -> bool:
        """Tell whether `thread`, which waits in the system call `call`, may make another socket."""
        self._answered.pop(thread, None)  # it asks again, so what it asked for before is made
        try:
            if not self._has_room(thread):  # a current count includes calls that have continued
                waiting = self._answered.items()
                self._answered = {
                    each: ran for each, ran in waiting if not _went_on(each, ran, call)
                }
                if not self._has_room(thread):
                    return False
            self._answered[thread] = _ran(thread)
        except OSError:  # the caller has ended
            return False
        return True

    def _has_room(self, thread: int) -> bool:
        return _count(thread) + len(self._answered) < _MOST


def answer_request(listener: int, notification: Notification) -> None:
    """Answer a request of ioctl(2) that asks for an interface."""
    try:
        for address, data in _answer(notification):
            if not write_bytes(listener, notification, address, data):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    except OSError as error:
        notifications.refuse(listener, notification, error.errno or errno.EIO)
    else:
        notifications.succeed(listener, notification)


def _answer(notification: Notification) -> list[tuple[int, bytes]]:
    """Return the bytes that the answer writes, each with its address."""
    descriptor, request, address = notification.arguments[:3]
    request &= 0xFFFFFFFF
    if not _is_socket(notification.thread, descriptor & 0xFFFFFFFF):
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    if request == _SIOCGIFCONF:
        return _list_of_interfaces(notification.thread, address)
    given = bytes_at(notification.thread, address, _NAME.size)
    if len(given) < _NAME.size:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    name, number = _NAME.unpack(given)
    asks_for_name = request == _SIOCGIFNAME
    # An alias, lo:1, is the interface too (netdevice(7)).
    if (
        number != _LOOPBACK
        if asks_for_name
        else name.partition(b"\0")[0].partition(b":")[0] != b"lo"
    ):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    if request == _SIOCETHTOOL:  # psutil.net_if_stats asks for a speed, which lo does not have
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if asks_for_name:
        return [(address, b"lo".ljust(16, b"\0"))]
    return [(address + 16, _OF_LOOPBACK[request])]


def _list_of_interfaces(thread: int, address: int) -> list[tuple[int, bytes]]:
    """Return lo with its address if the buffer has room for it, and else the length that it needs
    (netdevice(7)); the JVM asks for both."""
    given = bytes_at(thread, address, _CONF.size)
    if len(given) < _CONF.size:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    length, buffer = _CONF.unpack(given)
    entry = (b"lo".ljust(16, b"\0") + _ADDRESS).ljust(_IFREQ_BYTES, b"\0")
    listed = [(buffer, entry)] if buffer and length >= _IFREQ_BYTES else []
    told = _IFREQ_BYTES if listed or not buffer else 0
    return [*listed, (address, struct.pack("=i", told))]


def _is_socket(thread: int, descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/{thread}/fd/{descriptor}").startswith("socket:")
    except FileNotFoundError:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None


def _count(thread: int) -> int:
    """Return the kernel's count in the network namespace of a thread.

    It has sockets without an address, too, which /proc/net/netlink has not.
    """
    with open(f"/proc/{thread}/net/protocols", "rb") as file:
        return next(int(line.split()[2]) for line in file if line.startswith(b"NETLINK "))


def _went_on(thread: int, ran: int, call: int) -> bool:
    """Tell whether a thread that was answered has finished the call, so that its socket counts."""
    try:
        with open(f"/proc/{thread}/syscall", "rb") as file:
            word = file.read().split()[0]
        return int(word) != call if word != b"running" else _ran(thread) - ran > _LONG_NS
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended
    except OSError:
        return False


def _ran(thread: int) -> int:
    with open(f"/proc/{thread}/schedstat", "rb") as file:
        return int(file.read().split()[0])

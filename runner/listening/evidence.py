"""A description of a refused call, in words: for the record, never for a decision about the guest.

The caller's memory is read while it waits, but threads that share the memory may change it, and its
whole content is the guest's choice.
"""

import _socket
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from ..fixed_root import PROC_NAMES
from ..kernel.notifications import Notification, int32
from .waiting_call import TEXT_BYTES, bytes_at, text_at

_ACCESS = ("O_RDONLY", "O_WRONLY", "O_RDWR", "3")
_OPEN_FLAGS = (
    "O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND", "O_DIRECTORY", "O_NOFOLLOW", "O_PATH", "O_TMPFILE",
)  # fmt: skip
_NAMESPACES = {
    0x20000: "CLONE_NEWNS", 0x2000000: "CLONE_NEWCGROUP", 0x4000000: "CLONE_NEWUTS",
    0x8000000: "CLONE_NEWIPC", 0x10000000: "CLONE_NEWUSER", 0x20000000: "CLONE_NEWPID",
    0x40000000: "CLONE_NEWNET", 0x80: "CLONE_NEWTIME",
}  # fmt: skip
_TYPE_MASK = 0xF
_AT_FDCWD = -100

ArgumentText = Callable[[int, int], str]  # (thread, argument) -> text


def describe(call: str, notification: Notification) -> tuple[str, ...]:
    """Return the arguments of `call` in words if the call is known, else as numbers."""
    arguments = notification.arguments
    if call in ("connect", "bind"):
        address = sockaddr(notification.thread, arguments[1], arguments[2])
        return str(int32(arguments[0])), address
    if call in _SIGNATURES:
        pairs = zip(_SIGNATURES[call], arguments, strict=False)
        return tuple(text(notification.thread, argument) for text, argument in pairs)
    return tuple(
        hex(argument) for argument in arguments[:2]
    )  # further registers may not be arguments


def who(thread: int) -> str:
    """Return name and pid, in the cell's numbering, of the calling process."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        return "?"
    name = _printable(lines.get(b"Name", b"?").strip())
    return f"{name} ({lines.get(b'NSpid', b'?').split()[-1].decode()})"


def quoted(data: bytes) -> str:
    """Return a guest's bytes as one line of unambiguous ASCII."""
    mark = "..." if len(data) >= TEXT_BYTES else ""
    return ascii(data.decode("utf-8", "surrogateescape")) + mark


class OpenAttempt(NamedTuple):
    """An attempt to open: the given name, and the path that it means by name alone."""

    name: bytes
    path: str
    flags: int


def open_attempt(call: str, notification: Notification) -> OpenAttempt:
    """Read the request of one of open(2)'s four forms."""
    arguments = notification.arguments
    at = int32(arguments[0]) if call in ("openat", "openat2") else _AT_FDCWD
    name_at, flags = arguments[:2] if call in ("open", "creat") else arguments[1:3]
    if call == "creat":
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    elif call == "openat2":  # flags are the first member of struct open_how
        flags = int.from_bytes(bytes_at(notification.thread, flags, 8), "little")
    name = text_at(notification.thread, name_at)
    return OpenAttempt(name, _absolute(notification.thread, at, os.fsdecode(name)), flags)


def _absolute(thread: int, directory: int, name: str) -> str:
    """Return `name` as an absolute path; a relative name without `..` lies beneath shown
    directories."""
    if name.startswith("/"):
        return name
    if ".." not in name and name not in PROC_NAMES:  # lscpu opens `cpuinfo` in a directory
        return "/workspace/"
    link = "cwd" if directory == _AT_FDCWD else f"fd/{directory}"
    try:
        return f"{os.readlink(f'/proc/{thread}/{link}')}/{name}"
    except OSError:
        return "/workspace/"


def sockaddr(thread: int, address: int, length: int) -> str:
    """Return a socket address in words (sockaddr(3type))."""
    data = bytes_at(thread, address, min(length & 0xFFFFFFFF, 128))
    if len(data) < 2:
        return hex(address)
    (family,) = struct.unpack_from("=H", data)
    if family == _socket.AF_INET and len(data) >= 8:
        return f"{_socket.inet_ntoa(data[4:8])}:{int.from_bytes(data[2:4], 'big')}"
    if family == _socket.AF_INET6 and len(data) >= 24:
        name = _socket.inet_ntop(_socket.AF_INET6, data[8:24])
        return f"[{name}]:{int.from_bytes(data[2:4], 'big')}"
    if family == _socket.AF_UNIX:
        return "unix " + quoted(data[2:].rstrip(b"\0"))
    return _family(0, family)


def leads_outside(address: str) -> bool:
    """Tell whether a socket address, in words, is one to which a cell with network rules has no route:
    its own are loopback and those that stand for names."""
    import ipaddress  # slow to import, and few cells have network rules

    from ..egress.addresses import NETWORK

    try:
        host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:  # not an IP address
        return False
    host = getattr(host, "ipv4_mapped", None) or host
    return not (host.is_loopback or host.is_unspecified or host in NETWORK)


def _printable(data: bytes) -> str:
    return ascii(data.decode("utf-8", "surrogateescape"))[1:-1]


def _number(_: int, argument: int) -> str:
    return str(int32(argument))


def _hex(_: int, argument: int) -> str:
    return hex(argument)


def _path(thread: int, argument: int) -> str:
    return quoted(text_at(thread, argument))


def _directory(_: int, argument: int) -> str:
    return "AT_FDCWD" if int32(argument) == _AT_FDCWD else str(int32(argument))


def flag_names(argument: int) -> str:
    """Return the flags of open(2) by name."""
    access = _ACCESS[argument & os.O_ACCMODE]
    named = [name for name in _OPEN_FLAGS if argument & (flag := getattr(os, name)) == flag]
    return "|".join([access, *named])


def _open_flags(_: int, argument: int) -> str:
    return flag_names(argument)


def _family(_: int, argument: int) -> str:
    import socket  # for the names; seldom needed, and slow to import

    try:
        return socket.AddressFamily(argument & 0xFFFFFFFF).name
    except ValueError:
        return f"family {argument & 0xFFFFFFFF}"


def _type(_: int, argument: int) -> str:
    import socket  # as above

    try:
        return socket.SocketKind(argument & _TYPE_MASK).name
    except ValueError:
        return f"type {argument & _TYPE_MASK}"


def _signal(_: int, argument: int) -> str:
    import signal  # slow to import, and seldom needed

    try:
        return signal.Signals(argument & 0xFFFFFFFF).name
    except ValueError:
        return str(int32(argument))


def _namespaces(_: int, argument: int) -> str:
    named = [name for flag, name in _NAMESPACES.items() if argument & flag]
    return "|".join(named) or hex(argument)


_SIGNATURES: dict[str, tuple[ArgumentText, ...]] = {
    call: signature
    for signature, calls in (
        ((_path, _open_flags), "open"),
        ((_path, _hex), "creat umount2 swapon fsopen"),
        ((_directory, _path, _open_flags), "openat"),
        ((_directory, _path), "openat2 execveat name_to_handle_at"),
        ((_path,), "execve chroot acct sethostname"),
        ((_family, _type, _number), "socket socketpair"),
        ((_path, _path, _path, _hex), "mount"),
        ((_path, _path), "pivot_root add_key request_key"),
        ((_path, _hex, _hex), "mknod"),
        ((_directory, _path, _hex, _hex), "mknodat"),
        (
            (_number,),
            "keyctl process_vm_readv process_vm_writev setuid setgid bpf syslog finit_module",
        ),
        ((_directory, _path, _hex), "open_tree"),
        ((_namespaces,), "clone unshare"),
        ((_number, _namespaces), "setns"),
        ((_number, _number), "ptrace pidfd_getfd kcmp"),
        ((_number, _signal), "kill"),
        ((_number, _hex), "seccomp prctl ioctl io_uring_setup sendmsg"),
        ((_hex,), "personality userfaultfd"),
        ((_hex, _number), "perf_event_open"),
        ((), "fork vfork"),
    )
    for call in calls.split()
}

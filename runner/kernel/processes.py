"""Processes and namespaces: clone3, unshare, close_range."""

import signal
import struct

from . import libc

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_PIDFD = 0x00001000
_CLONE_INTO_CGROUP = 0x200000000

_CLONE_ARGS = struct.Struct("=11Q")


def clone3(flags: int, cgroup: int | None = None) -> tuple[int, int]:
    """Fork into the new namespaces of `flags`; return (pid, pidfd), and (0, -1) in the child.

    With `cgroup`, a directory descriptor, the child starts life in that v2 cgroup (attaching it
    later by a write costs ten times as much).  Neither Python's nor glibc's fork hooks run: the
    caller must be single-threaded, and the child must not start threads (a child that it forks
    with `os.fork` may).
    """
    pidfd = libc.buffer(struct.pack("=i", -1))
    flags |= _CLONE_PIDFD | (_CLONE_INTO_CGROUP if cgroup is not None else 0)
    fields = (flags, libc.address(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup or 0)
    arguments = libc.buffer(_CLONE_ARGS.pack(*fields))
    pid = libc.syscall("clone3", arguments, _CLONE_ARGS.size)
    return pid, struct.unpack("=i", pidfd.raw)[0] if pid else -1


def unshare(flags: int) -> None:
    libc.call("unshare", flags)


def close_range(first: int, last: int) -> None:
    """Close every descriptor from `first` to `last`, by number: a sweep through /proc/self/fd can
    be denied and then closes nothing."""
    if first <= last:
        libc.syscall("close_range", first, last, 0)


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    first = 0
    for descriptor in sorted(keep):
        close_range(first, descriptor - 1)
        first = descriptor + 1
    close_range(first, 0xFFFFFFFF)

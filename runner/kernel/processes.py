"""Processes and namespaces: clone, setns, unshare, close_range."""

import contextlib
import os
from collections.abc import Iterator

from . import _steps, libc

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_ADDR_NO_RANDOMIZE = 0x0040000  # personality(2)
_ASK = 0xFFFFFFFF


@contextlib.contextmanager
def without_randomized_addresses() -> Iterator[None]:
    """Have what this thread starts meanwhile do without a random address layout."""
    before = libc.syscall("personality", _ASK)
    libc.syscall("personality", before | _ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.syscall("personality", before)


def sleeper(flags: int, proc: int) -> tuple[int, int, int, int, int]:
    """Start a process in the new namespaces of `flags` that sleeps until it is killed; return its
    pidfd and its pid, net, ipc and uts namespaces.

    It is in pause(2) and executes nothing else, so it can share our memory and descriptors, and
    costs next to nothing.  We have to ignore SIGCHLD, as it does then.  `proc` is /proc of our pid
    namespace.  Raises OSError, whose filename says what was refused.
    """
    return _steps.sleeper(flags, proc)


def copy_descriptor(process: int, descriptor: int) -> int:
    """Return a descriptor of ours for the open file that `descriptor` is in `process`, a pidfd; it is
    closed on exec (pidfd_getfd(2), Linux 5.6)."""
    return libc.syscall("pidfd_getfd", process, descriptor, 0)


def enter(namespace: int, kind: int = 0) -> None:
    """Move into the namespace that a descriptor stands for, of a `kind` such as CLONE_NEWNET or of any;
    into a pid namespace it is our children that move (setns(2))."""
    libc.syscall("setns", namespace, kind)


def unshare(flags: int) -> None:
    libc.syscall("unshare", flags)


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


def company_of(pid: int, init: int) -> str:
    """Return what runs in a cell beside the thread `pid`, in words; its orphans are children of `init`.

    Raises FileNotFoundError if one has ended, or the kernel lists no children (CONFIG_PROC_CHILDREN).
    """
    if len(os.listdir(f"/proc/{pid}/task")) != 1:
        return "runs threads"
    for each in (pid, init):
        with open(f"/proc/{each}/task/{each}/children", "rb") as file:
            if file.read(64).strip():
                return "has child processes"
    return ""

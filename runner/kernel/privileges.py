"""Capabilities, host name and seccomp: the calls that python-prctl does not have."""

import errno
import os
import struct

from . import libc

_CAPABILITY_VERSION_3 = 0x20080522
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER = 1 << 3
_WAIT_KILLABLE_RECV = 1 << 5
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28


def drop_bounding_set(last_capability: int) -> None:
    """Empty the bounding set up to the kernel's own last capability, which a header may not know."""
    for capability in range(last_capability + 1):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"prctl drop {capability}")


def set_securebits(bits: int) -> None:
    libc.call("prctl", _PR_SET_SECUREBITS, bits, 0, 0, 0)


def clear_capabilities(but: int | None = None) -> None:
    """Empty the effective, permitted and inheritable sets (capset(2)); ambient follows.

    `but` is a capability below 32 that stays effective and permitted.
    """
    kept = 0 if but is None else 1 << but
    header = libc.buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    libc.syscall("capset", header, libc.buffer(struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


def sethostname(name: str) -> None:
    data = name.encode()
    libc.call("sethostname", data, len(data))
    libc.call("setdomainname", data, len(data))


def install_seccomp_filter(program: bytes) -> None:
    """Install a compiled BPF `program` for this thread and what it starts (seccomp(2))."""
    _install(program, 0)


def install_with_listener(program: bytes) -> int:
    """Install `program` and return the descriptor on which its notifications are answered.

    Once a notification was received only a fatal signal takes its caller out of the call (Linux
    5.19); an older kernel would restart the call, and so count it twice.
    """
    try:
        return _install(program, _NEW_LISTENER | _WAIT_KILLABLE_RECV)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _install(program, _NEW_LISTENER)


def _install(program: bytes, flags: int) -> int:
    instructions = libc.buffer(program)
    header = struct.pack("=HxxxxxxQ", len(program) // 8, libc.address(instructions))
    return libc.syscall("seccomp", _SECCOMP_SET_MODE_FILTER, flags, libc.buffer(header))

"""Capabilities, securebits, host name and seccomp, by system calls."""

import os
import struct
from collections.abc import Collection

from . import syscall
from .steps import Descriptor, SystemCalls

_CAPABILITY_VERSION_3 = 0x20080522
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER = 1 << 3
_WAIT_KILLABLE_RECV = 1 << 5
_PR_CAPBSET_DROP = 24
# linux/securebits.h; each is followed by the bit that locks it.
SECBIT_NOROOT, SECBIT_NO_SETUID_FIXUP = 1 << 0, 1 << 2
SECBIT_KEEP_CAPS, SECBIT_NO_CAP_AMBIENT_RAISE = 1 << 4, 1 << 6
_PR_SET_SECUREBITS = 28
_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 4, 15, 38


def has_capability(capability: int) -> bool:
    """Tell whether a capability below 32 is effective in this process (capget(2))."""
    sets = bytearray(24)
    syscall("capget", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), sets)
    return bool(sets[capability // 8] >> capability % 8 & 1)


def drop_bounding_set(
    do: SystemCalls[Descriptor], last_capability: int, but: Collection[int] = ()
) -> None:
    """Empty the bounding set up to the kernel's own last capability, which a header may not know."""
    for capability in {*range(last_capability + 1)} - {*but}:
        do.call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0, about=f"drop {capability}")


def set_securebits(do: SystemCalls[Descriptor], bits: int) -> None:
    do.call("prctl", _PR_SET_SECUREBITS, bits, 0, 0, 0, about="securebits")


def clear_capabilities(do: SystemCalls[Descriptor], but: Collection[int] = ()) -> None:
    """Empty the effective, permitted and inheritable sets (capset(2)); ambient follows.

    Those of `but`, all below 32, stay effective and permitted.
    """
    kept = sum(1 << each for each in but)
    header = do.structure(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    sets = do.structure(struct.pack("=6I", kept, kept, 0, 0, 0, 0))
    do.call("capset", header, sets, about=f"only {', '.join(map(str, but))}" if but else "none")


def set_no_new_privs(do: SystemCalls[Descriptor]) -> None:
    do.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, about="no_new_privs")


def set_dumpable(do: SystemCalls[Descriptor], value: int) -> None:
    do.call("prctl", _PR_SET_DUMPABLE, value, 0, 0, 0, about=f"dumpable {value}")


def set_name(do: SystemCalls[Descriptor], name: str) -> None:
    do.call("prctl", _PR_SET_NAME, name.encode(), about=f"name {name}")


def become(uid: int) -> None:
    """Turn from root into `uid` for good: ids, supplementary groups, and so all capabilities.

    Raises OSError where root lacks CAP_SETUID or CAP_SETGID, as in some containers.
    """
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"becoming uid {uid}") from None


def sethostname(name: str) -> None:
    data = name.encode()
    syscall("sethostname", data, len(data))
    syscall("setdomainname", data, len(data))


def install_seccomp_filter(
    do: SystemCalls[Descriptor], program: bytes, *, listens: bool = False
) -> Descriptor:
    """Install a compiled BPF `program` for this thread and its children (seccomp(2)).

    With `listens` the answer is the descriptor on which its notifications are answered.  Once a
    notification was received only a fatal signal takes its caller out of the call (Linux 5.19).
    """
    flags = (_NEW_LISTENER | _WAIT_KILLABLE_RECV) if listens else 0
    header = do.structure(struct.pack("=HxxxxxxQ", len(program) // 8, 0), {8: program})
    about = f"a filter of {len(program) // 8} instructions{', with a listener' if listens else ''}"
    return do.call("seccomp", _SECCOMP_SET_MODE_FILTER, flags, header, about=about)

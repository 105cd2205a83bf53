"""Ids, capabilities and the flags that keep them away.  The only module that imports prctl.

python-prctl is GPL-3.0-or-later; this module runs in the launcher process and in cells, never in
the process that embeds cellwright.
"""
# pyright: reportAttributeAccessIssue=false - prctl makes its functions at import time

import os

import prctl

from ..kernel import privileges as kernel
from ..kernel.now import Now
from ..kernel.steps import Descriptor, SystemCalls

# A process with no capability could regain one by exec of a set-uid-root file or by setuid; these
# bits end both, and their locks cannot be undone (capabilities(7), "The securebits flags").
_NO_CAP_AMBIENT_RAISE_AND_LOCK = 0x40 | 0x80
_CAP_SYS_ADMIN = 21  # linux/capability.h
_SECUREBITS = (
    prctl.SECBIT_NOROOT
    | prctl.SECBIT_NOROOT_LOCKED
    | prctl.SECBIT_NO_SETUID_FIXUP
    | prctl.SECBIT_NO_SETUID_FIXUP_LOCKED
    | prctl.SECBIT_KEEP_CAPS_LOCKED
    | _NO_CAP_AMBIENT_RAISE_AND_LOCK
)


def set_process_name(do: SystemCalls[Descriptor], name: str) -> None:
    """Name this process for ps(1); at most 15 bytes."""
    kernel.set_name(do, name)


def make_undumpable(do: SystemCalls[Descriptor]) -> None:
    """Hide memory, environment and descriptors of this process from others of its uid (ptrace(2))."""
    kernel.set_dumpable(do, 0)


def make_dumpable(do: SystemCalls[Descriptor]) -> None:
    """Undo that, in a process that was forked from one that hides."""
    kernel.set_dumpable(do, 1)


def map_ids(
    do: SystemCalls[Descriptor], proc: int, inside: int, outside_uid: int, outside_gid: int
) -> None:
    """Map one uid and one gid into the user namespace just entered, through the /proc at `proc`.

    setgroups must be denied there or in a namespace above it, or the kernel refuses the gid map
    (user_namespaces(7)).
    """
    _write(do, proc, "self/uid_map", f"{inside} {outside_uid} 1")
    _write(do, proc, "self/gid_map", f"{inside} {outside_gid} 1")


def deny_setgroups(do: SystemCalls[Descriptor], proc: int) -> None:
    """Refuse setgroups(2) in the user namespace just entered and in all that are made below it."""
    _write(do, proc, "self/setgroups", "deny")


def _write(do: SystemCalls[Descriptor], directory: int, path: str, text: str) -> None:
    opened = do.call("openat", directory, path.encode(), os.O_WRONLY | os.O_CLOEXEC, about=path)
    do.call("write", opened, text.encode(), len(text), about=path)
    do.call("close", opened)


def give_up_all(do: SystemCalls[Descriptor], last_capability: int) -> None:
    """Empty every capability set for good.  The order: dropping from the bounding set and setting
    securebits both need CAP_SETPCAP, so the sets themselves go last."""
    kernel.drop_bounding_set(do, last_capability)
    kernel.set_securebits(do, _SECUREBITS)
    kernel.clear_capabilities(do)
    kernel.set_no_new_privs(do)


def keep_only_sys_admin(do: SystemCalls[Descriptor], last_capability: int) -> None:
    """Give up every capability but the one that new namespaces need, of this process's own user
    namespace, and any way to another; for a process that never executes a program."""
    kernel.drop_bounding_set(do, last_capability)
    kernel.clear_capabilities(do, but=_CAP_SYS_ADMIN)
    kernel.set_no_new_privs(do)


def has_sys_admin() -> bool:
    return bool(prctl.cap_effective.sys_admin)


def become(uid: int) -> None:
    """Turn from root into `uid` for good: ids, supplementary groups, and so all capabilities.

    Raises OSError where root lacks CAP_SETUID or CAP_SETGID, as in some containers.
    """
    kernel.become(uid)
    make_dumpable(Now())  # the change cleared it, and with it our right to our own /proc/self

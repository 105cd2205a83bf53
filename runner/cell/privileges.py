"""Ids, capabilities and the flags that keep them away.  The only module that imports prctl.

python-prctl is optional: it exists only as source, so a host without a compiler does without. It is
GPL-3.0-or-later; this module runs in the launcher process and in cells, never in the process that
embeds cellwright.
"""
# pyright: reportAttributeAccessIssue=false - prctl makes its functions at import time

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import os
from collections.abc import Collection

try:
    import prctl
except ImportError:
    prctl = None

from ..kernel import credentials as kernel
from ..kernel import mounts
from ..kernel import process_calls as processes
from ..kernel.steps import Descriptor, Now, SystemCalls

# A process with no capability could regain one by exec of a set-uid-root file or by setuid; these
# bits end both, and their locks cannot be undone (capabilities(7), "The securebits flags").
_AND_LOCK = 0b11
_NOBODY = 65534
_CAP_SYS_ADMIN = 21  # linux/capability.h
_SECUREBITS = (
    kernel.SECBIT_NOROOT * _AND_LOCK
    | kernel.SECBIT_NO_SETUID_FIXUP * _AND_LOCK
    | kernel.SECBIT_KEEP_CAPS << 1  # locked without being set
    | kernel.SECBIT_NO_CAP_AMBIENT_RAISE * _AND_LOCK
)
# Root of an image keeps them over the files and ids of its own image alone: the user namespace that it
# is in owns nothing.  chown, dac_override, fowner, fsetid, kill, setgid, setuid, setfcap.
OF_AN_IMAGE = (0, 1, 3, 4, 5, 6, 7, 31)
# It regains these, and no others, when it executes a program as uid 0, and loses them with that uid.
_SECUREBITS_OF_AN_IMAGE = (
    kernel.SECBIT_KEEP_CAPS << 1 | kernel.SECBIT_NO_CAP_AMBIENT_RAISE * _AND_LOCK
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


def map_owner(mount: int, owner: os.stat_result, host_uid: int, *, with_root: bool = False) -> None:
    """Have `host_uid` own the files of `owner` on a detached mount, and no others; needs root.
    `with_root`: root can make files there too; on the disk they belong to the id 65534."""
    if owner.st_uid == host_uid:
        return
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:  # makes the user namespace that tells the ids
        try:
            processes.unshare(processes.CLONE_NEWUSER)
            os.write(tell, os.readlink("/proc/self").encode())  # its number where /proc was mounted
            os.close(tell)
            _signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        proc = f"/proc/{os.read(told, 20).decode()}"
        for kind, number in (("uid", owner.st_uid), ("gid", owner.st_gid)):
            with open(f"{proc}/{kind}_map", "w") as file:
                file.write(f"{number} {host_uid} 1\n" + (f"{_NOBODY} 0 1\n" if with_root else ""))
        namespace = os.open(f"{proc}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        mounts.map_ids(mount, namespace)
        os.close(namespace)
    finally:
        os.close(told)
        os.kill(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)


def deny_setgroups(do: SystemCalls[Descriptor], proc: int) -> None:
    """Refuse setgroups(2) in the user namespace just entered and in all that are made below it."""
    _write(do, proc, "self/setgroups", "deny")


def limit_watches(do: SystemCalls[Descriptor], settings: int, instances: int, watches: int) -> None:
    """Limit inotify in the user namespace just entered, through /proc/sys at `settings`, which leads
    to the settings of the namespace of the process that opens them."""
    _write(do, settings, "user/max_inotify_instances", str(instances))
    _write(do, settings, "user/max_inotify_watches", str(watches))


def allow_all_ports(do: SystemCalls[Descriptor], settings: int) -> None:
    """Let programs of any id listen on ports below 1024 of the cell's own network namespace, for which
    they would need CAP_NET_BIND_SERVICE (ip-sysctl, ip_unprivileged_port_start)."""
    _write(do, settings, "net/ipv4/ip_unprivileged_port_start", "0")


def _write(do: SystemCalls[Descriptor], directory: int, path: str, text: str) -> None:
    opened = do.call("openat", directory, path.encode(), os.O_WRONLY | os.O_CLOEXEC, about=path)
    do.call("write", opened, text.encode(), len(text), about=path)
    do.call("close", opened)


def give_up_all(
    do: SystemCalls[Descriptor], last_capability: int, but: Collection[int] = ()
) -> None:
    """Empty every capability set for good, but for those of root in an image.  The order: dropping from
    the bounding set and setting securebits both need CAP_SETPCAP, so the sets themselves go last."""
    kernel.drop_bounding_set(do, last_capability, but)
    kernel.set_securebits(do, _SECUREBITS_OF_AN_IMAGE if but else _SECUREBITS)
    kernel.clear_capabilities(do, but)
    kernel.set_no_new_privs(do)


def keep_only_sys_admin(do: SystemCalls[Descriptor], last_capability: int) -> None:
    """Give up every capability but the one that new namespaces need, of this process's own user
    namespace, and any way to another; for a process that never executes a program."""
    kernel.drop_bounding_set(do, last_capability)
    kernel.clear_capabilities(do, (_CAP_SYS_ADMIN,))
    kernel.set_no_new_privs(do)


def has_sys_admin() -> bool:
    if prctl is None:
        return kernel.has_capability(_CAP_SYS_ADMIN)
    return bool(prctl.cap_effective.sys_admin)


def become(uid: int) -> None:
    """Turn from root into `uid` for good: ids, supplementary groups, and so all capabilities.

    Raises OSError where root lacks CAP_SETUID or CAP_SETGID, as in some containers.
    """
    kernel.become(uid)
    make_dumpable(Now())  # the change cleared it, and with it our right to our own /proc/self

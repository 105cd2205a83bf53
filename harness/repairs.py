"""What to do about a layer that is missing: the words doctor ends with."""

import os
from pathlib import Path

_CGROUP = (
    "on a systemd host: pip install 'cellwright[systemd]' (a delegated scope is then asked for) "
    "in a session, or after loginctl enable-linger USER; "
    "elsewhere run as root or name a directory you own: Sandbox(cgroup_root=...); "
    "or go without: --optional cgroup"
)
REPAIRS = {
    "landlock": "boot Linux 5.19 or newer with landlock in lsm=, or go without: --optional landlock",
    "listener": "boot Linux 5.0 or newer, or go without: --optional listener",
    "cgroup_memory": _CGROUP,
    "cgroup_pids": _CGROUP,
    "cgroup_cpu": _CGROUP,
}


def repair_of_launch(message: str) -> str:
    """Return the exact repair for a launcher that could not be set up."""
    if _is("/proc/sys/user/max_user_namespaces", "0"):
        return "sysctl -w user.max_user_namespaces=15000 (and a file in /etc/sysctl.d to keep it)"
    if os.geteuid() and _is("/proc/sys/kernel/unprivileged_userns_clone", "0"):
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if os.geteuid() and _is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"):
        return (
            "AppArmor restricts user namespaces here (Ubuntu 23.10 and later): give this Python a "
            "profile with `userns,`, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if "becoming uid" in message:
        return (
            "this root may not become another user, and cells never run as root: docker run "
            "--user 1000, or --cap-add SETUID --cap-add SETGID --cap-add KILL"
        )
    if "may not signal" in message:
        return "cells are another user's than root: docker run --cap-add KILL, or --user 1000"
    if "unshare: No space left" in message:  # unshare(2), ENOSPC
        return (
            "user namespaces are used up, or switched off from outside (bwrap --disable-userns): "
            "raise sysctl user.max_user_namespaces there"
        )
    if "proc" in message:
        return (
            "a container masks /proc, and the kernel then allows no new one: docker run "
            "--security-opt systempaths=unconfined, podman run --security-opt unmask=ALL"
        )
    if "seccomp" in message or "libseccomp" in message:
        return "apt-get install libseccomp2"
    if "prctl" in message:
        return "apt-get install libcap-dev gcc python3-dev; pip install python-prctl"
    return "a container may forbid namespaces: docker run --security-opt seccomp=unconfined"


def _is(path: str, expected: str) -> bool:
    try:
        return Path(path).read_text().strip() == expected
    except OSError:
        return False

"""Repairs: the commands that doctor prints for a layer or a launcher that fails on this host."""

import os
import re
import tomllib
from pathlib import Path

from ....policies.policy import CGROUP
from ....runner.cgroups.detect import hierarchies

_WITHOUT = "or continue with weaker caps: --optional cgroup"
_MOUNTS = "/proc/self/mountinfo"  # proc(5)
MOUNT_PROC = "mount -t proc proc /proc"
_KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def repair_of_layer(layer: str) -> str:
    """Return the repair of a layer that this host lacks; empty if none is known."""
    return (
        _repair_of_cgroups() if layer.startswith(CGROUP) else str(_KNOWN["layers"].get(layer, ""))
    )


def _repair_of_cgroups() -> str:
    mounts = _read(_MOUNTS)
    tops = hierarchies(mounts)
    if not tops or os.geteuid() == 0:
        return (
            "on a systemd host run it in a login session, or after loginctl enable-linger USER: then "
            "systemd delegates a cgroup; elsewhere run as root, or in a container with /sys/fs/cgroup "
            f"writable; {_WITHOUT}"
        )
    places = (tops | hierarchies(mounts, ("freezer",))).values()  # cells can do without the last
    mine = " ".join(f"{top}/cellwright" for top in dict.fromkeys(places))
    user = os.geteuid()
    return (
        f"as root: mkdir {mine} && chown -R {user} {mine}; then "
        f"export CELLWRIGHT_CGROUP_ROOT={next(iter(tops.values()))}/cellwright; {_WITHOUT}"
    )


_LABEL = "/proc/self/attr/apparmor/current"


def apparmor_profile(interpreter: str) -> str:
    """Return an AppArmor profile that permits user namespaces to `interpreter`, which launchers run,
    for hosts that refuse them to unconfined programs (Ubuntu 24.04).

    AppArmor matches the file that is executed, not the link by which it was called.
    """
    template: str = _KNOWN["profile"]
    return template.format(path=re.sub(r'[\\"*?\[\]{}^]', r"\\\g<0>", interpreter))


def repair_of_launch(message: str) -> str:
    """Return the repair of a launcher that failed to start with `message`."""
    if not Path("/proc/self").exists():
        return MOUNT_PROC
    if _is("/proc/sys/user/max_user_namespaces", "0"):
        return "sysctl -w user.max_user_namespaces=15000 (and a file in /etc/sysctl.d to keep it)"
    # The next two also apply to root, which changes its uid before it makes namespaces.
    if _is("/proc/sys/kernel/unprivileged_userns_clone", "0"):
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") and _is(
        _LABEL, "unconfined"
    ):
        return str(_KNOWN["apparmor"])
    known = (repair for said, repair in _KNOWN["launch"].items() if said in message)
    return next(known, "") or _repair_of_refusal(message)


def _repair_of_refusal(message: str) -> str:
    """Return every option that the container needs, in one command."""
    forbidden = (
        ("seccomp=unconfined", "\nSeccomp:\t2\n" in _read("/proc/self/status")),  # proc(5)
        ("apparmor=unconfined", _profile()),
        ("systempaths=unconfined", _proc_is_covered()),
    )
    options = " ".join(f"--security-opt {option}" for option, holds in forbidden if holds)
    if not options:
        # To root the kernel refuses first to make / private, which is no mount point in most chroots.
        is_chroot = "unshare: Operation not permitted" in message or "/" not in _mount_points()
        return _KNOWN["chroot"] if is_chroot else "please report this"
    masks = (
        "; a masked /proc prevents a new mount of it (podman: --security-opt unmask=ALL, Kubernetes: "
        "procMount: Unmasked)"
    )
    by = f", by AppArmor's profile {_profile()}" if _profile() else ""
    return f"a container forbids it{by}: docker run {options}{masks if _proc_is_covered() else ''}"


def _profile() -> str:
    """Return the AppArmor profile that confines this process; empty if none does."""
    label = _read(_LABEL).strip()
    return "" if label == "unconfined" or label.endswith("(unconfined)") else label


def _proc_is_covered() -> bool:
    """Tell whether a mount covers a part of /proc: the kernel then refuses a new mount of proc
    (fs/namespace.c, mount_too_revealing).  A mount on a directory made for it covers nothing."""
    places = _mount_points() - {"/proc/sys/fs/binfmt_misc"}
    return any(place.startswith("/proc/") for place in places)


def _mount_points() -> set[str]:
    return {line.split()[4] for line in _read(_MOUNTS).splitlines()}


def _is(path: str, expected: str) -> bool:
    return _read(path).strip() == expected


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

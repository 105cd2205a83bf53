"""Repairs: the commands that doctor prints for a layer or a launcher that fails on this host."""

import os
import re
from pathlib import Path

from ...policies.extras import how_to_install
from ...policies.policy import CGROUP
from ...runner.cgroups.detect import hierarchies

_WITHOUT = "or continue with weaker caps: --optional cgroup"
_MOUNTS = "/proc/self/mountinfo"  # proc(5)
MOUNT_PROC = "mount -t proc proc /proc"
REPAIRS = {
    "landlock": "boot Linux 5.19 or newer with landlock in lsm=, or go without: --optional landlock",
    "listener": "boot Linux 5.0 or newer, or go without: --optional listener",
}


def repair_of_layer(layer: str) -> str:
    """Return the repair of a layer that this host lacks; empty if none is known."""
    return _repair_of_cgroups() if layer.startswith(CGROUP) else REPAIRS.get(layer, "")


def _repair_of_cgroups() -> str:
    tops = hierarchies(_read(_MOUNTS))
    if not tops or os.geteuid() == 0:
        return (
            "on a systemd host, so that systemd delegates a cgroup in a login session, or after "
            f"loginctl enable-linger USER, {how_to_install('systemd')}; elsewhere run as root, or in "
            f"a container with /sys/fs/cgroup writable; {_WITHOUT}"
        )
    mine = " ".join(f"{top}/cellwright" for top in dict.fromkeys(tops.values()))
    user = os.geteuid()
    return (
        f"as root: mkdir {mine} && chown -R {user} {mine}; then "
        f"export CELLWRIGHT_CGROUP_ROOT={next(iter(tops.values()))}/cellwright; {_WITHOUT}"
    )


# A part of the message of a launcher that cannot start, and the repair.
_LAUNCH = (
    (
        "becoming uid",
        (
            "root may not change its uid here, and cells never run as root: docker run "
            "--user 1000, or --cap-add SETUID --cap-add SETGID --cap-add KILL"
        ),
    ),
    (
        "may not signal",
        "root may not signal its cells here: docker run --cap-add KILL, or --user 1000",
    ),
    (
        "unshare: No space left",  # unshare(2), ENOSPC
        (
            "the limit of user namespaces is reached, or zero outside this sandbox (bwrap "
            "--disable-userns): raise sysctl user.max_user_namespaces there"
        ),
    ),
    ("libseccomp", "apt-get install libseccomp2"),
    ("package prctl", "apt-get install libcap-dev gcc python3-dev; pip install python-prctl"),
)
_APPARMOR = (
    "AppArmor restricts user namespaces here (Ubuntu 23.10 and later): install a profile that "
    "permits them to this Python: "
    "cellwright doctor --apparmor | sudo tee /etc/apparmor.d/cellwright && "
    "sudo apparmor_parser -r /etc/apparmor.d/cellwright"
)
_LABEL = "/proc/self/attr/apparmor/current"
_APPARMOR_PROFILE = """\
# Printed by `cellwright doctor --apparmor`, for AppArmor 4 and newer.  It confines nothing: every
# program of this Python may make user namespaces, and has in them the powers that come with those.
abi <abi/4.0>,
include <tunables/global>

profile cellwright "{path}" flags=(unconfined) {{
  userns,

  include if exists <local/cellwright>
}}
"""
_CHROOT = (
    "the kernel makes no user namespace in a chroot (unshare(2)): start cellwright outside, or enter "
    "with bwrap or systemd-nspawn, which call pivot_root"
)


def apparmor_profile(interpreter: str) -> str:
    """Return an AppArmor profile that permits user namespaces to `interpreter`, which launchers run,
    for hosts that refuse them to unconfined programs (Ubuntu 24.04).

    AppArmor matches the file that is executed, not the link by which it was called.
    """
    return _APPARMOR_PROFILE.format(path=re.sub(r'[\\"*?\[\]{}^]', r"\\\g<0>", interpreter))


def repair_of_launch(message: str) -> str:
    """Return the repair of a launcher that failed to start with `message`."""
    if not Path("/proc/self").exists():
        return MOUNT_PROC
    if _is("/proc/sys/user/max_user_namespaces", "0"):
        return "sysctl -w user.max_user_namespaces=15000 (and a file in /etc/sysctl.d to keep it)"
    # The next two hold for root as well: it changes its uid before it makes namespaces.
    if _is("/proc/sys/kernel/unprivileged_userns_clone", "0"):
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") and _is(
        _LABEL, "unconfined"
    ):
        return _APPARMOR
    known = (repair for said, repair in _LAUNCH if said in message)
    return next(known, "") or _repair_of_refusal(message)


def _repair_of_refusal(message: str) -> str:
    """Return every option that the container needs, in one command."""
    forbidden = (
        ("seccomp=unconfined", _filtered()),
        ("apparmor=unconfined", _profile()),
        ("systempaths=unconfined", _proc_is_covered()),
    )
    options = " ".join(f"--security-opt {option}" for option, holds in forbidden if holds)
    if not options:
        return _CHROOT if "unshare: Operation not permitted" in message else "please report this"
    masks = (
        "; a masked /proc prevents a new mount of it (podman: --security-opt unmask=ALL, Kubernetes: "
        "procMount: Unmasked)"
    )
    by = f", by AppArmor's profile {_profile()}" if _profile() else ""
    return f"a container forbids it{by}: docker run {options}{masks if _proc_is_covered() else ''}"


def _filtered() -> bool:
    """Tell whether this process runs under a seccomp filter (proc(5), Seccomp)."""
    return "\nSeccomp:\t2\n" in _read("/proc/self/status")


def _profile() -> str:
    """Return the AppArmor profile that confines this process; empty if none does."""
    label = _read(_LABEL).strip()
    return "" if label == "unconfined" or label.endswith("(unconfined)") else label


def _proc_is_covered() -> bool:
    """Tell whether a mount covers a part of /proc: the kernel then refuses a new mount of proc
    (fs/namespace.c, mount_too_revealing).  A mount on a directory made for it covers nothing."""
    places = {line.split()[4] for line in _read(_MOUNTS).splitlines()}
    return any(place.startswith("/proc/") for place in places - {"/proc/sys/fs/binfmt_misc"})


def _is(path: str, expected: str) -> bool:
    return _read(path).strip() == expected


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

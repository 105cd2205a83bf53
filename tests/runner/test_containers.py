"""Inside a container as an engine makes one, by runc: what its defaults forbid, and what lifts them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cellwright.policies.compiling.host import ALWAYS
from tests.conftest import CAPS
from tests.runner.test_nested import script, told
from tests.runner.test_ordinary_user import PYTHON, USER, readable

pytestmark = [
    pytest.mark.needs("root", "userns", "runc"),
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason="the system has no Python of this version"
    ),
]
__all__ = ["readable"]  # the fixture

# Docker's: what a container's root may do, and what of /proc is covered or read-only.
CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_SETGID",
    "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
]  # fmt: skip
COVERED = {
    "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi"],
    "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
}
# Of its filter, what is refused without CAP_SYS_ADMIN.
REFUSED = ["mount", "umount2", "unshare", "setns", "pivot_root", "fsopen", "fsmount", "open_tree"]
FILTER = {
    "seccomp": {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": REFUSED, "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        ],
    }
}


def mount(place: str, kind: str, *options: str) -> dict[str, Any]:
    source = place if kind == "bind" else kind
    return {"destination": place, "type": kind, "source": source, "options": list(options)}


def container(place: Path, user: int, cgroups: str, **forbidden: object) -> dict[str, Any]:
    """Return runc's description of one that runs `script` on a root that cannot be written."""
    mounts = [
        mount("/proc", "proc"), mount("/dev", "tmpfs", "nosuid", "mode=755"),
        mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        mount("/sys/fs/cgroup", "cgroup", cgroups, "nosuid", "noexec", "nodev"),
        mount("/usr", "bind", "rbind", "ro"), mount("/etc", "bind", "rbind", "ro"),
        mount("/tmp", "tmpfs"), mount(str(place), "bind", "bind", "ro"),
    ]  # fmt: skip
    held = CAPABILITIES if user == 0 else []
    process = {
        "user": {"uid": user, "gid": user}, "args": script(place), "cwd": "/",
        "env": ["PATH=/usr/sbin:/usr/bin", "HOME=/nowhere"], "noNewPrivileges": True,
        "capabilities": {"bounding": held, "effective": held, "permitted": held},
    }  # fmt: skip
    linux = {
        "cgroupsPath": f"/cellwright-container-{os.getpid()}",
        "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
    }
    root = {"path": "root", "readonly": True}
    return {
        "ociVersion": "1.0.2", "process": process, "root": root, "mounts": mounts,
        "linux": linux | forbidden,
    }  # fmt: skip


def inside(
    bundle: Path, place: Path, user: int, cgroups: str = "ro", **forbidden: object
) -> dict[str, Any]:
    (bundle / "root").mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (bundle / "root" / name).symlink_to(f"usr/{name}")
    (bundle / "config.json").write_text(json.dumps(container(place, user, cgroups, **forbidden)))
    name = f"cellwright-{os.getpid()}"
    return told(
        subprocess.run(
            ["runc", "--root", str(bundle / "state"), "run", name], cwd=bundle,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )
    )  # fmt: skip


USERS = pytest.mark.parametrize("user", [0, USER], ids=["root", "a user without capabilities"])


@USERS
def test_what_an_engine_forbids_is_refused_and_named_at_once(
    tmp_path: Path, readable: Path, user: int
) -> None:
    answer = inside(tmp_path, readable, user, **COVERED, **FILTER)
    assert "unshare: Operation not permitted" in answer["refusal"]
    for option in ("seccomp=unconfined", "systempaths=unconfined"):
        assert f"--security-opt {option}" in answer["repair"]


@USERS
def test_where_only_proc_is_masked_only_that_is_named(
    tmp_path: Path, readable: Path, user: int
) -> None:
    answer = inside(tmp_path, readable, user, **COVERED)
    assert "fsmount proc: Operation not permitted" in answer["refusal"]
    assert "systempaths=unconfined" in answer["repair"]
    assert "seccomp" not in answer["repair"]


@USERS
def test_once_that_is_lifted_everything_but_the_caps_holds(
    tmp_path: Path, readable: Path, user: int
) -> None:
    answer = inside(tmp_path, readable, user)
    assert {*ALWAYS, "listener", "landlock"} <= set(answer["layers"]), answer
    assert not set(CAPS) & set(answer["layers"])
    assert answer["doctor"] == "PASS"


def test_root_has_the_caps_too_where_cgroups_are_writable(tmp_path: Path, readable: Path) -> None:
    answer = inside(tmp_path, readable, 0, cgroups="rw")
    assert {*ALWAYS, *CAPS} <= set(answer["layers"]), answer

"""The cgroup that systemd delegates to a service with Delegate=yes (systemd.resource-control(5))."""

import contextlib
from pathlib import Path

from .tree import CONTROLLERS, write

_MOUNT = Path("/sys/fs/cgroup")
_SUBGROUP = "daemon"


def take_delegation(mount: Path = _MOUNT) -> str | None:
    """Prepare the service's own cgroup for cells and return its directory; None if this process is
    in no delegated service.  Call it only where the unit delegates its cgroup: its other processes
    move too.

    This process moves into a child group: cgroup v2 gives controllers only to the children of a
    group without processes (cgroup-v2.rst, "No Internal Process Constraint").
    """
    directory = _service(mount)
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        subgroup = directory / _SUBGROUP
        subgroup.mkdir(exist_ok=True)
        for pid in (directory / "cgroup.procs").read_text().split():
            write(f"{subgroup}/cgroup.procs", pid)
        available = (directory / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{name}" for name in CONTROLLERS if name in available)
        write(f"{directory}/cgroup.subtree_control", wanted)
        return str(directory)
    return None


def _service(mount: Path) -> Path | None:
    """Return the v2 directory of the service of this process, also with DelegateSubgroup=."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, place = line.split(":", 2)
        if number == "0":
            parts = place.strip("/").split("/")
            while parts and not parts[-1].endswith(".service"):
                parts.pop()
            return mount.joinpath(*parts) if parts else None
    return None

"""config.json of a container that holds a launcher (runtime-spec, "config.md"): a pure function.

The container is one more fence around a launcher and its cells.  Each cell is confined inside it as
it is without a container, by the same plan.
"""

from typing import Any, NamedTuple

from ...policies.plan import Plan

# What a launcher does as root before it becomes another id: it makes namespaces and mounts, opens what
# only root may open, and changes its ids.  It ends its children, which have the other id.
_OF_ROOT = (
    "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID",
    "CAP_SYS_ADMIN",
)  # fmt: skip
# Without root it has a user namespace, and only maps its one id, 0 there, into the next
# (user_namespaces(7), since Linux 5.12).
_OF_USER = ("CAP_SETFCAP",)
_NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
_MASKED = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/proc/sched_debug",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_BOUND = ("rbind", "rprivate", "nosuid", "nodev")


class Mount(NamedTuple):
    """A path of the host and its place in a container."""

    place: str
    source: str
    writable: bool = False


class Ids(NamedTuple):
    """The ids of the user on the host that a container's root stands for; None for root itself."""

    uid: int
    gid: int


def container_config(
    plan: Plan, arguments: tuple[str, ...], mounts: tuple[Mount, ...], ids: Ids | None
) -> dict[str, Any]:
    """Return the configuration of a container whose first process has these `arguments`.

    Its root is the directory `root` beside config.json, read-only.
    """
    capabilities = _OF_ROOT if ids is None else _OF_USER
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "root": {"path": "root", "readonly": True},
        "hostname": plan.hostname,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "env": [],
            "args": list(arguments),
            "capabilities": {name: list(capabilities) for name in sets},
            "rlimits": [
                {"type": f"RLIMIT_{name}", "soft": value, "hard": value}
                for name, value in plan.rlimits if name == "CORE"
            ],
            "noNewPrivileges": True,
        },
        "mounts": [*_OWN, *map(_mount, mounts)],
        "linux": _linux(ids),
    }  # fmt: skip


def single_call_config(
    plan: Plan, arguments: tuple[str, ...], mounts: tuple[Mount, ...], ids: Ids | None,
    hidden: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration of a container for one program, around which there is no cell: its
    caps and its own filesystems are those of the plan.  Directories of `hidden` look empty."""
    config = container_config(plan, arguments, mounts, ids)
    kept = (
        [] if ids else ["CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
    )  # to start the program without any
    config["process"]["capabilities"] = {
        name: list(kept) for name in config["process"]["capabilities"]
    }
    config["mounts"] += [
        _tmpfs(each.target, each.executable, f"size={each.size_bytes}", f"nr_inodes={each.inodes}")
        for each in plan.tmpfs
    ]
    config["mounts"] += [_tmpfs(path, False, "ro", "size=4k") for path in hidden]
    config["linux"] |= {"maskedPaths": list(_MASKED), "readonlyPaths": list(_READ_ONLY)}
    if ids is None:
        config["linux"]["resources"] = {
            "memory": {"limit": plan.memory_bytes, "swap": plan.memory_bytes},
            "pids": {"limit": plan.processes + _OF_CONTAINER},
            "cpu": {"period": _PERIOD, "quota": int(plan.cpus * _PERIOD)},
        }
    return config


_OF_CONTAINER = 16  # processes and threads of the container itself
_PERIOD = 100_000  # microseconds


def _tmpfs(place: str, executable: bool, *options: str) -> dict[str, Any]:
    rights = () if executable else ("noexec",)
    return {
        "destination": place, "type": "tmpfs", "source": "tmpfs",
        "options": ["nosuid", "nodev", "mode=1777", *rights, *options],
    }  # fmt: skip


_OWN = (
    {
        "destination": "/proc", "type": "proc", "source": "proc",
        "options": ["nosuid", "nodev", "noexec"],
    },
    {
        "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
        "options": ["nosuid", "noexec", "mode=755", "size=64k"],
    },
)  # fmt: skip


def _mount(mount: Mount) -> dict[str, Any]:
    rights = "rw" if mount.writable else "ro"
    return {
        "destination": mount.place, "type": "bind", "source": mount.source,
        "options": [*_BOUND, rights],
    }  # fmt: skip


def _linux(ids: Ids | None) -> dict[str, Any]:
    namespaces = [{"type": name} for name in _NAMESPACES]
    if ids is None:
        # No seccomp filter: cells would inherit it, and what it refuses their listener would not see.
        # Cells have no way to these files, and the launcher loses root.
        return {
            "namespaces": namespaces,
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        }
    # The kernel lets a user namespace mount a proc only while it sees a whole one
    # (mount_too_revealing), so nothing of /proc is covered; no id in here may read what root may.
    return {
        "namespaces": [*namespaces, {"type": "user"}],
        "uidMappings": [{"containerID": 0, "hostID": ids.uid, "size": 1}],
        "gidMappings": [{"containerID": 0, "hostID": ids.gid, "size": 1}],
    }

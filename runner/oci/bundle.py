"""Bundles: the directory of a container, with its configuration, its root and the runtime's notes.

config.json is made by a pure function (runtime-spec, "config.md").  The container is one more fence
around a launcher and its cells: each cell is confined inside it as it is without a container, by
the same plan.  Cells may see a directory of the host as their root, read-only.

The root of a bundle holds nothing but places for mounts, and links.  It is of this user alone, and
goes when the launcher in the container has ended.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...policies.errors import LaunchError, PolicyError
from ...policies.plan import Plan
from ...policies.policy import lies_in
from ..cgroups.cgroup_tree import has_ended, this_process
from ..fixed_root import NETWORK_TEXTS, TEXTS

# Capabilities of a launcher until it changes its id: it makes namespaces and mounts, opens files that
# only root may open, changes its ids, and kills its children, which have the other id.
_OF_ROOT = (
    "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID",
    "CAP_SYS_ADMIN",
)  # fmt: skip
# Without root the launcher is in a user namespace, and only maps its one id, 0 there, into the next one
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
    )  # the program starts without capabilities
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
        # No seccomp filter: cells would inherit it, and their listener would not see its refusals.
        # Cells cannot reach these files, and the launcher gives up root.
        return {
            "namespaces": namespaces,
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        }
    # Nothing of /proc is covered, because the kernel lets a user namespace mount a proc only while it
    # sees a complete one (mount_too_revealing). No id in the container may read what only root may
    # read.
    return {
        "namespaces": [*namespaces, {"type": "user"}],
        "uidMappings": [{"containerID": 0, "hostID": ids.uid, "size": 1}],
        "gidMappings": [{"containerID": 0, "hostID": ids.gid, "size": 1}],
    }


# Not taken from the image: cells have their own of these, or nothing; /boot is for machines.
_NOT_SHOWN = ("proc", "sys", "dev", "run", "tmp", "workspace", "boot", ".cellwright")
_OWN_TEXTS = frozenset((*TEXTS, *NETWORK_TEXTS))
_ETC = "/etc"
_MOST_ENTRIES = 10_000


class RootFilesystem(NamedTuple):
    """The part of a root file system that cells see, by the paths in cells."""

    directory: str
    trees: tuple[str, ...]  # top directories and files that the container shows completely
    files: tuple[str, ...]  # the files that cells see: not those of /etc that cells have themselves
    links: tuple[tuple[str, str], ...]

    def has(self, path: str) -> bool:
        """Tell whether `path` is of this root file system, and not of the host."""
        return lies_in(path, self.trees) or lies_in(path, tuple(link for link, _ in self.links))


def open_rootfs(given: str) -> RootFilesystem:
    """Look at the directory `given`; raises PolicyError if another user can change it."""
    directory = os.path.realpath(given)
    _check(given, directory)
    trees: list[str] = []
    files: list[str] = []
    links: list[tuple[str, str]] = []
    for entry in _entries(directory):
        place = f"/{entry.name}"
        if entry.name in _NOT_SHOWN:
            continue
        if entry.is_symlink():
            links.append((place, os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            trees.append(place)
            if place != _ETC:
                files.append(place)
    if _ETC in trees:
        for entry in _entries(directory + _ETC):
            place = f"{_ETC}/{entry.name}"
            if place in _OWN_TEXTS:
                continue
            if entry.is_symlink():
                links.append((place, os.readlink(entry.path)))
            elif entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                files.append(place)
    if not trees:
        raise PolicyError(
            f"rootfs: there is no directory in {given}", "name the root of a file system"
        )
    return RootFilesystem(directory, tuple(trees), tuple(files), tuple(links))


def _check(given: str, directory: str) -> None:
    try:
        found = os.stat(directory)
    except OSError as error:
        raise PolicyError(f"rootfs: {given}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise PolicyError(f"rootfs: must be a directory, an OCI image layout or a tar, got {given}")
    if directory == "/":
        raise PolicyError(
            "rootfs: must not be the host's own root", "give no rootfs to use its Python"
        )
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(
            f"rootfs: {given} can be changed by another user",
            "let it belong to you or to root, and be writable by its owner only",
        )


def _entries(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        entries = [entry for _, entry in zip(range(_MOST_ENTRIES + 1), found, strict=False)]
    if len(entries) > _MOST_ENTRIES:
        raise PolicyError(f"rootfs: {directory} has more than {_MOST_ENTRIES} entries")
    return sorted(entries, key=lambda entry: entry.name)


_PREFIX = "cellwright-oci"
_CONFIG, _ROOT, _STATE, _RUNTIME = "config.json", "root", "state", "runtime"
_PID = "pid"


class Bundle:
    """The directory of one container, which is named as its directory is."""

    def __init__(self, links: Iterable[tuple[str, str]], program: str) -> None:
        """Make a bundle for a runtime's `program`, with `links` in its root; raises LaunchError."""
        try:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}-{this_process()}-")  # 0700
        except OSError as error:
            raise LaunchError(f"cannot make a bundle: {error.filename}: {error.strerror}") from None
        try:
            Path(self.path, _RUNTIME).write_text(program)
            os.mkdir(self.state, 0o700)
            _make_root(Path(self.path, _ROOT), links)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot write {error.filename}: {error.strerror}") from None
            raise

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def state(self) -> str:
        """The directory of the runtime's own notes."""
        return os.path.join(self.path, _STATE)

    @property
    def pid_file(self) -> str:
        return os.path.join(self.path, _PID)

    def write_config(self, config: dict[str, Any]) -> None:
        self.add(_CONFIG, json.dumps(config).encode())

    def add(self, name: str, data: bytes) -> str:
        """Write a file in the bundle, below its root or not, and return its path."""
        path = Path(self.path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def add_texts(self, texts: Mapping[str, str]) -> None:
        """Write files of the root."""
        for place, text in texts.items():
            self.add(_ROOT + place, text.encode())

    def remove(self) -> None:
        """Remove it; a mount in it, which no runtime leaves, is never entered."""
        remove_bundle(Path(self.path))


def remove_bundle(path: Path) -> bool:
    """Remove the directory of a bundle unless something is mounted in it; return whether it is gone."""
    inside = f" {path}/"
    if inside in Path("/proc/self/mountinfo").read_text():
        return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def leftover_bundles() -> Iterator[tuple[Path, str]]:
    """Yield the bundles of this user whose process has ended, each with its runtime's program."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*-*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o170777 != 0o040700:
                continue
            if has_ended(path.name.removeprefix(f"{_PREFIX}-")):
                yield path, _program_of(path)


def _program_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return (path / _RUNTIME).read_text()
    return ""


def state_of(path: Path) -> str:
    """Return the directory of a runtime's notes in the bundle at `path`."""
    return str(path / _STATE)


def _make_root(root: Path, links: Iterable[tuple[str, str]]) -> None:
    root.mkdir(0o755)
    for name in ("proc", "dev", "tmp"):
        (root / name).mkdir(0o755)
    for path, target in links:
        link = root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(target)

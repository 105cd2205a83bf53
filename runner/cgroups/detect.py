"""Detection of the control groups that this process may use."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .systemd import delegated_scope
from .tree import CgroupTree, NoCgroups, remove_given_up, remove_with_cells, start_time, write
from .v1 import CgroupTreeV1
from .v2 import CgroupTreeV2

_PREFIX = "cellwright"
_WANTED = ("memory", "cpu", "pids", "cpuacct")
_USABLE = (
    "a delegated v2 cgroup is one, and so is a directory in a v1 hierarchy, such as "
    "/sys/fs/cgroup/memory/mine with /sys/fs/cgroup/pids/mine and the like beside it"
)
_counter = itertools.count()


def open_tree(keeper: int, root: str | None = None) -> CgroupTree:
    """Return the tree for a new supervisor whose launcher's keeper is the process `keeper`.

    `root`, else CELLWRIGHT_CGROUP_ROOT, names a directory to use: a delegated v2 cgroup; a
    directory of one v1 hierarchy, which stands for its namesakes in the others; or one that holds a
    directory for each v1 controller, as /sys/fs/cgroup does.

    Default: the v1 hierarchies that have the controllers, if this process may write there; else a
    v2 scope that systemd delegates; else the top of v2, if systemd does not own it.
    """
    root = root or os.environ.get("CELLWRIGHT_CGROUP_ROOT")
    try:
        tree = _tree(keeper, root)
    except OSError as error:
        return NoCgroups(f"{error.filename}: {error.strerror}")
    tree.missing["memory"] = tree.missing["memory"] or not_counted(_command_line())
    return tree


def _tree(keeper: int, root: str | None) -> CgroupTree:
    if root is not None:
        return _at(Path(root))
    if found := hierarchies(mountinfo()):
        return _v1(found)
    return _v2(keeper)


def _command_line() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cmdline").read_text()
    return ""


def not_counted(command_line: str) -> str:
    """Return why the kernel does not count its own memory or that of sockets, "" if it does: the
    command line option `cgroup.memory=nokmem,nosocket` switches that off."""
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name == "cgroup.memory" and {"nokmem", "nosocket"} & set(value.split(",")):
            return f"the kernel was booted with {word}, and so does not count all memory of a cell"
    return ""


def mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _at(root: Path) -> CgroupTree:
    if (root / "cgroup.controllers").exists():
        sweep([root])
        return CgroupTreeV2(root / _name(), create=True)
    children = {name: root / name for name in _WANTED if (root / name).is_dir()}
    if found := _namesakes(root) or children:
        return _v1(found)
    return NoCgroups(f"{root} is no cgroup directory: {_USABLE}")


def _namesakes(root: Path) -> dict[str, Path]:
    """Return controller -> the directory at the same place in its v1 hierarchy as `root` has in one
    of them: /sys/fs/cgroup/pids/mine for /sys/fs/cgroup/memory/mine."""
    tops = hierarchies(mountinfo())
    place = next((root.relative_to(top) for top in tops.values() if root.is_relative_to(top)), None)
    if place is None:
        return {}
    return {name: top / place for name, top in tops.items() if (top / place).is_dir()}


def _v1(directories: dict[str, Path]) -> CgroupTree:
    freezer = _freezer_beside(directories)
    sweep([*directories.values(), *([freezer] if freezer else [])])
    return CgroupTreeV1(directories, _name(), freezer)


def _freezer_beside(directories: dict[str, Path]) -> Path | None:
    """Return the freezer's directory at the same place in its hierarchy, if it is ours to write."""
    mounts = mountinfo()
    tops, freezers = hierarchies(mounts), hierarchies(mounts, ("freezer",))
    for name, directory in directories.items():
        for freezer in freezers.values():
            if name in tops and directory.is_relative_to(tops[name]):
                found = freezer / directory.relative_to(tops[name])
                return found if found.is_dir() and os.access(found, os.W_OK) else None
    return None


def _v2(keeper: int) -> CgroupTree:
    scope, refusal = delegated_scope(keeper, _name())
    if scope:
        return CgroupTreeV2(scope, create=False)
    top = _mount_point_of_v2(mountinfo())
    if top is None:
        return NoCgroups("no cgroup file system is mounted")
    if not os.access(top / "cgroup.subtree_control", os.W_OK):
        return NoCgroups(f"{top} is not ours to write, and systemd: {refusal}")
    _enable_at(top)
    sweep([top])
    return CgroupTreeV2(top / _name(), create=True)


def _enable_at(top: Path) -> None:
    """Enable the controllers below the top of the visible tree.

    In a container the top is not the real root and holds our own processes; the kernel then answers
    EBUSY, and the operator has to provide a directory (CELLWRIGHT_CGROUP_ROOT).
    """
    available = (top / "cgroup.controllers").read_text().split()
    wanted = [f"+{name}" for name in _WANTED if name in available]
    write(top / "cgroup.subtree_control", " ".join(wanted))


def _name() -> str:
    return f"{_PREFIX}-{os.getpid()}-{start_time(os.getpid())}-{next(_counter)}"


def sweep_host() -> list[Path]:
    """Remove what killed supervisors left in the directories that `open_tree` would use; return what
    was removed."""
    root = os.environ.get("CELLWRIGHT_CGROUP_ROOT")
    if root is not None:
        found = _namesakes(Path(root)) or {"": Path(root)}
    else:
        top = _mount_point_of_v2(mountinfo())
        found = hierarchies(mountinfo()) or ({"": top} if top else {})
    freezer = _freezer_beside(found)
    return sweep([*found.values(), *([freezer] if freezer else [])])


def sweep(parents: Iterable[Path]) -> list[Path]:
    """Remove what a killed supervisor left behind, never a living supervisor's cgroups; return what
    was removed."""
    removed: list[Path] = []
    remove_given_up()
    for parent in parents:
        for left in parent.glob(f"{_PREFIX}-*-*-*"):
            _, pid, start, *_ = left.name.split("-")
            dead = pid.isdecimal() and start_time(int(pid)) != start
            if dead and remove_with_cells(left):
                removed.append(left)
    return removed


def hierarchies(mounts: str, wanted: tuple[str, ...] = _WANTED) -> dict[str, Path]:
    """Return controller -> v1 mount point, from the text of /proc/self/mountinfo."""
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for option in options.split(" ")[0].split(","):
                if option in wanted:
                    found.setdefault(option, _mount_point(left))
    return found


def _mount_point_of_v2(mounts: str) -> Path | None:
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return _mount_point(left)
    return None


def _mount_point(left: str) -> Path:
    """Return the fifth field of a mountinfo line, its octal escapes undone (proc(5))."""
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split(" ")[4]))

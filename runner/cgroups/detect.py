"""Detection of the control groups that this process may use."""

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterable

from .cgroup_tree import (
    CgroupTree,
    lock_of,
    read,
    remove_given_up,
    remove_with_cells,
    start_time,
    this_process,
    write,
)
from .v1 import CgroupTreeV1
from .v2 import CgroupTreeV2

_PREFIX = "cellwright"
_WANTED = ("memory", "cpu", "pids", "cpuacct")
_USABLE = (
    "a delegated v2 cgroup is one, and so is a directory in a v1 hierarchy, such as "
    "/sys/fs/cgroup/memory/mine with /sys/fs/cgroup/pids/mine and the like beside it"
)
_NUMBERS = 3  # numbers after the prefix in the name of a directory (`_name`)
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # these say nothing about the host's layers
_counter = itertools.count()


def open_tree(keeper: int, root: str | None = None) -> CgroupTree:
    """Return the tree for a new supervisor whose launcher's keeper is the process `keeper`.

    `root`, else CELLWRIGHT_CGROUP_ROOT, names a directory to use: a delegated v2 cgroup; a
    directory of one v1 hierarchy, which stands for its namesakes in the others; or one that holds a
    directory for each v1 controller, as /sys/fs/cgroup does.

    Default: the v1 hierarchies that have the controllers, if this process may write there; else a
    v2 scope that systemd delegates; else the top of v2, if systemd does not own it.  Raises OSError
    where this process lacks descriptors or memory to look.
    """
    root = root or os.environ.get("CELLWRIGHT_CGROUP_ROOT") or None  # empty is unset
    try:
        tree = _tree(keeper, root)
    except OSError as error:
        if error.errno in _SHORT_OF:
            raise
        return CgroupTree(f"{error.filename}: {error.strerror}")
    tree.missing["memory"] = tree.missing["memory"] or not_counted(_command_line())
    return tree


def _tree(keeper: int, root: str | None) -> CgroupTree:
    if root is not None:
        from pathlib import PurePath  # most callers take the default

        return _at(str(PurePath(root)))
    if found := hierarchies(mountinfo()):
        return _v1(found)
    return _v2(keeper)


def _command_line() -> str:
    with contextlib.suppress(OSError):
        return read("/proc/cmdline")
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
    return read("/proc/self/mountinfo")


def _at(root: str) -> CgroupTree:
    if os.path.exists(f"{root}/cgroup.controllers"):
        sweep([root])
        return CgroupTreeV2(f"{root}/{_name()}", create=True)
    children = {name: f"{root}/{name}" for name in _WANTED if os.path.isdir(f"{root}/{name}")}
    if found := _namesakes(root) or children:
        return _v1(found)
    return CgroupTree(f"{root} is no cgroup directory: {_USABLE}")


def _namesakes(root: str) -> dict[str, str]:
    """Return controller -> the directory at the same place in its v1 hierarchy as `root` has in one
    of them: /sys/fs/cgroup/pids/mine for /sys/fs/cgroup/memory/mine."""
    tops = hierarchies(mountinfo())
    places = (_place_in(top, root) for top in tops.values())
    place = next((found for found in places if found is not None), None)
    if place is None:
        return {}
    return {name: top + place for name, top in tops.items() if os.path.isdir(top + place)}


def _place_in(top: str, directory: str) -> str | None:
    """Return the path of a directory relative to `top`; None if it is not inside."""
    place = directory.removeprefix(top)
    is_in = directory == top or (directory.startswith(top) and place.startswith("/"))
    return place if is_in else None


def _v1(directories: dict[str, str]) -> CgroupTree:
    freezer = _freezer_beside(directories)
    sweep([*directories.values(), *([freezer] if freezer else [])])
    return CgroupTreeV1(directories, _name(), freezer)


def _freezer_beside(directories: dict[str, str]) -> str | None:
    """Return the freezer's directory at the same place in its hierarchy, if it is ours to write."""
    mounts = mountinfo()
    tops, freezers = hierarchies(mounts), hierarchies(mounts, ("freezer",))
    for name, directory in directories.items():
        for freezer in freezers.values():
            place = _place_in(tops[name], directory) if name in tops else None
            if place is not None:
                found = freezer + place
                return found if os.path.isdir(found) and os.access(found, os.W_OK) else None
    return None


def _v2(keeper: int) -> CgroupTree:
    from .systemd import delegated_scope  # imported only without cgroup v1

    scope, refusal = delegated_scope(keeper, _name())
    if scope:
        return CgroupTreeV2(str(scope), create=False)
    top = _mount_point_of_v2(mountinfo())
    if top is None:
        return CgroupTree("no cgroup file system is mounted")
    if not os.access(f"{top}/cgroup.subtree_control", os.W_OK):
        return CgroupTree(f"{top} is not ours to write, and systemd: {refusal}")
    _enable_at(top)
    sweep([top])
    return CgroupTreeV2(f"{top}/{_name()}", create=True)


def _enable_at(top: str) -> None:
    """Enable the controllers below the top of the visible tree.

    In a container the top is not the real root and holds our own processes; the kernel then answers
    EBUSY, and the operator has to provide a directory (CELLWRIGHT_CGROUP_ROOT).
    """
    available = read(f"{top}/cgroup.controllers").split()
    wanted = [f"+{name}" for name in _WANTED if name in available]
    write(f"{top}/cgroup.subtree_control", " ".join(wanted))


def _name() -> str:
    return f"{_PREFIX}-{this_process()}-{next(_counter)}"


def sweep_host() -> list[str]:
    """Remove what killed supervisors left in the directories that `open_tree` would use; return what
    was removed."""
    root = os.environ.get("CELLWRIGHT_CGROUP_ROOT")
    if root:
        found = _namesakes(root) or {"": root}
    else:
        top = _mount_point_of_v2(mountinfo())
        found = hierarchies(mountinfo()) or ({"": top} if top else {})
    freezer = _freezer_beside(found)
    return sweep([*found.values(), *([freezer] if freezer else [])])


def sweep(parents: Iterable[str]) -> list[str]:
    """Remove what a killed supervisor left behind, never a living supervisor's cgroups; return what
    was removed."""
    removed: list[str] = []
    remove_given_up()
    for parent in parents:
        for name in _names_in(parent):
            prefix, *numbers = name.split("-")
            if prefix != _PREFIX or len(numbers) < _NUMBERS or not numbers[0].isdecimal():
                continue
            left = f"{parent}/{name}"
            if start_time(int(numbers[0])) != numbers[1] and _remove_unlocked(left):
                removed.append(left)
    return removed


def _remove_unlocked(directory: str) -> bool:
    """Remove it unless its supervisor lives in another pid namespace, where its number says nothing."""
    with contextlib.suppress(OSError):  # another process removed it, or it is another user's
        if (lock := lock_of(directory)) is not None:
            try:
                return remove_with_cells(directory)
            finally:
                os.close(lock)
    return False


def _names_in(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return []


def hierarchies(mounts: str, wanted: tuple[str, ...] = _WANTED) -> dict[str, str]:
    """Return controller -> v1 mount point, from the text of /proc/self/mountinfo."""
    found: dict[str, str] = {}
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for option in options.split(" ")[0].split(","):
                if option in wanted:
                    found.setdefault(option, _mount_point(left))
    return found


def _mount_point_of_v2(mounts: str) -> str | None:
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return _mount_point(left)
    return None


def _mount_point(left: str) -> str:
    """Return the fifth field of a mountinfo line, its octal escapes undone (proc(5))."""
    place = left.split(" ")[4]
    return (
        re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)
        if "\\" in place
        else place
    )

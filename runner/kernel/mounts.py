"""The mount API by descriptor (Linux 5.12): nothing here resolves a path twice.

See fsopen(2), open_tree(2), move_mount(2), mount_setattr(2), pivot_root(2).
"""

import os
import struct

from . import AT_FDCWD, syscall
from .steps import Descriptor, SystemCalls

_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_FSOPEN_CLOEXEC = 1
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
_FSMOUNT_CLOEXEC = 1
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MNT_DETACH = 2

RDONLY = 0x1
NOSUID = 0x2
NODEV = 0x4
NOEXEC = 0x8
_IDMAP = 0x100000
_MOUNT_ATTR = struct.Struct("=4Q")


def new(do: SystemCalls[Descriptor], kind: str, attributes: int, **options: str) -> Descriptor:
    """Make a detached mount of a new `kind` filesystem."""
    context = do.call("fsopen", kind.encode(), _FSOPEN_CLOEXEC, about=kind)
    for key, value in options.items():
        arguments = context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0
        do.call("fsconfig", *arguments, about=f"{kind} {key}={value}")
    do.call("fsconfig", context, _FSCONFIG_CMD_CREATE, None, None, 0, about=kind)
    mount = do.call("fsmount", context, _FSMOUNT_CLOEXEC, attributes, about=kind)
    do.call("close", context)
    return mount


def overlay(lower: str, upper: str, work: str) -> int:
    """Return a detached mount of `lower` whose changes go to `upper`, marked by attributes that need
    no privilege (overlayfs(5), userxattr)."""
    context = syscall("fsopen", b"overlay", _FSOPEN_CLOEXEC)
    try:
        syscall("fsconfig", context, _FSCONFIG_SET_FLAG, b"userxattr", None, 0, about="userxattr")
        for key, path in (("lowerdir", lower), ("upperdir", upper), ("workdir", work)):
            value = os.fsencode(path) + b"\0"
            syscall("fsconfig", context, _FSCONFIG_SET_STRING, key.encode(), value, 0, about=key)
        syscall("fsconfig", context, _FSCONFIG_CMD_CREATE, None, None, 0, about="overlay")
        return syscall("fsmount", context, _FSMOUNT_CLOEXEC, 0, about="overlay")
    finally:
        os.close(context)


def clone(do: SystemCalls[Descriptor], path: str) -> Descriptor:
    """Make a detached bind mount of `path`, mounts below it included."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return do.call("open_tree", AT_FDCWD, os.fsencode(path), flags, about=path)


def put(do: SystemCalls[Descriptor], mount: Descriptor, target: str) -> None:
    """Put a detached mount at `target` and close its descriptor."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    do.call("move_mount", mount, b"", AT_FDCWD, os.fsencode(target), flags, about=target)
    do.call("close", mount)


def put_making(
    do: SystemCalls[Descriptor], mount: Descriptor, target: str, *, is_directory: bool
) -> None:
    """Do the same with a mount point that is made first."""
    if is_directory:
        do.call("mkdirat", AT_FDCWD, os.fsencode(target), 0o777, about=target)
    else:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        do.call(
            "close", do.call("openat", AT_FDCWD, os.fsencode(target), flags, 0o444, about=target)
        )
    put(do, mount, target)


def clone_opened(descriptor: int) -> int:
    """Return a detached bind mount of the file or directory of `descriptor`, mounts below it
    included."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH
    return syscall("open_tree", descriptor, b"", flags)


def restrict(mount: int, attributes: int) -> None:
    """Set `attributes` on a detached mount and everything below it."""
    data = bytearray(_MOUNT_ATTR.pack(attributes, 0, 0, 0))
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    syscall("mount_setattr", mount, b"", flags, data, _MOUNT_ATTR.size)


def map_ids(mount: int, namespace: int) -> None:
    """Map the owners of files as the open user `namespace` does, on a detached mount and everything
    below it; needs CAP_SYS_ADMIN over their file systems (mount_setattr(2), Linux 5.12)."""
    data = bytearray(_MOUNT_ATTR.pack(_IDMAP, 0, 0, namespace))
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    syscall("mount_setattr", mount, b"", flags, data, _MOUNT_ATTR.size, about="mapped ids")


def make_read_only(path: str) -> None:
    """Set the mount at `path`, and only that one, read-only."""
    data = bytearray(_MOUNT_ATTR.pack(RDONLY, 0, 0, 0))
    syscall("mount_setattr", AT_FDCWD, os.fsencode(path), 0, data, _MOUNT_ATTR.size, about=path)


def make_opened_read_only(descriptor: int) -> None:
    """Set the mount that `descriptor` has open, and only that one, read-only."""
    data = bytearray(_MOUNT_ATTR.pack(RDONLY, 0, 0, 0))
    syscall("mount_setattr", descriptor, b"", _AT_EMPTY_PATH, data, _MOUNT_ATTR.size)


def attach_opened(mount: int, target: int) -> None:
    """Put a detached mount where `target` is open and close its descriptor."""
    try:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        syscall("move_mount", mount, b"", target, b"", flags)
    finally:
        os.close(mount)


def detach(target: str) -> None:
    """Unmount the top mount at `target`."""
    syscall("umount2", os.fsencode(target), _MNT_DETACH, about=target)


def make_private() -> None:
    """Stop mount events from crossing between this mount namespace and the one it was copied from."""
    syscall("mount", None, b"/", None, _MS_REC_PRIVATE, None)


def pivot_into(root: str) -> None:
    """Make `root`, a mount point, the root directory and forget everything outside it."""
    os.chdir(root)
    syscall("pivot_root", b".", b".", about=root)
    syscall("umount2", b".", _MNT_DETACH)
    os.chdir("/")

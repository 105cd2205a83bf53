"""Opening and removing files that somebody hostile made, or could have put in place of others."""

import os
import stat
import struct

from . import AT_FDCWD, _steps, syscall

_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _CACHED = 0x01, 0x02, 0x04, 0x08, 0x20
_NO_LINKS = _NO_MAGICLINKS | _NO_SYMLINKS
_OPEN_HOW = struct.Struct("=QQQ")


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """Open `path` beneath `directory`, through no link and into no other mount; raises OSError."""
    return _open(directory, path, flags, _NO_XDEV | _NO_LINKS | _BENEATH)


def open_within(directory: int, path: bytes, flags: int) -> int:
    """Open `path` beneath `directory`, through no link but into other mounts; raises OSError."""
    return _open(directory, path, flags, _NO_LINKS | _BENEATH)


def open_inside(directory: int, path: bytes, flags: int) -> int:
    """Open `path` beneath `directory`, through links that stay beneath it; raises OSError, EXDEV for
    one that leads out or is absolute."""
    return _open(directory, path, flags, _NO_MAGICLINKS | _BENEATH)


def open_on_mount(directory: int, path: bytes, flags: int, *, may_wait: bool) -> int:
    """Open `path` beneath `directory`, through links that stay beneath it, and into no other mount.

    Raises OSError, EXDEV for one that leads out, and EAGAIN if it took waiting for a disk or a server
    and that is not allowed (RESOLVE_CACHED, Linux 5.12).
    """
    cached = 0 if may_wait else _CACHED
    return _open(directory, path, flags, _NO_XDEV | _NO_MAGICLINKS | _BENEATH | cached)


def watch(number: int, inotify: int, file: int, mask: int) -> int:
    """Watch an open `file`, a link too, for events (inotify_add_watch(2), which has this `number`)."""
    watched = _steps.syscall(number, inotify, b"/proc/self/fd/%d" % file, mask)
    if watched < 0:
        raise OSError(-watched, os.strerror(-watched))
    return watched


def open_plain(path: bytes, flags: int) -> int:
    """Open the absolute `path`, which must lead through no link; raises OSError."""
    return _open(AT_FDCWD, path, flags, _NO_LINKS)


def open_from(directory: int, path: bytes, flags: int) -> int:
    """Open `path`, which may lead out of `directory`, through no link; raises OSError."""
    return _open(directory, path, flags, _NO_LINKS)


def allow_owner(directory: int, path: bytes, bits: int) -> None:
    """Add `bits` of the owner to the mode of `path` beneath `directory`, unless it is a link; raises
    OSError."""
    held = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(held).st_mode
        if mode & bits != bits and not stat.S_ISLNK(mode):
            os.chmod(f"/proc/self/fd/{held}", stat.S_IMODE(mode) | bits)
    finally:
        os.close(held)


def remove_tree(directory: int, name: str, *, is_superuser: bool = False) -> None:
    """Remove the directory `name` of `directory` with all that lies beneath it; raises OSError.

    Each directory beneath it is moved up into `directory` first, so that no depth takes recursion,
    descriptors or long paths.  Directories that their owner may not write become writable, unless the
    process `is_superuser` (CAP_DAC_OVERRIDE): then no mode refuses it, and it needs no /proc.
    """
    if not is_superuser:
        allow_owner(directory, os.fsencode(name), stat.S_IRWXU)
    waiting = [name]
    while waiting:
        name = waiting.pop()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=directory)
        try:
            for each in os.listdir(opened):
                if stat.S_ISDIR(os.stat(each, dir_fd=opened, follow_symlinks=False).st_mode):
                    if not is_superuser:
                        allow_owner(opened, os.fsencode(each), stat.S_IRWXU)  # its ".." is written
                    waiting.append(f".removed-{os.urandom(8).hex()}")
                    os.rename(each, waiting[-1], src_dir_fd=opened, dst_dir_fd=directory)
                else:
                    os.unlink(each, dir_fd=opened)
        finally:
            os.close(opened)
        os.rmdir(name, dir_fd=directory)


def _open(directory: int, path: bytes, flags: int, resolve: int) -> int:
    how = bytearray(_OPEN_HOW.pack(flags, 0, resolve))
    return syscall("openat2", directory, path, how, _OPEN_HOW.size)

"""Opening and removing files that somebody hostile made, or could have put in place of others."""

import os
import stat
import struct

from . import libc
from .libc import AT_FDCWD

_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
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


def open_plain(path: bytes, flags: int) -> int:
    """Open the absolute `path`, which must lead through no link; raises OSError."""
    return _open(AT_FDCWD, path, flags, _NO_LINKS)


def open_from(directory: int, path: bytes, flags: int) -> int:
    """Open `path`, which may lead out of `directory`, through no link; raises OSError."""
    return _open(directory, path, flags, _NO_LINKS)


def remove_tree(directory: int, name: str) -> None:
    """Remove the directory `name` of `directory` with all that lies beneath it; raises OSError.

    Each directory beneath it is moved up into `directory` first, so that no depth takes recursion,
    descriptors or long paths.
    """
    waiting = [name]
    while waiting:
        name = waiting.pop()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=directory)
        try:
            for each in os.listdir(opened):
                if stat.S_ISDIR(os.stat(each, dir_fd=opened, follow_symlinks=False).st_mode):
                    waiting.append(f".removed-{os.urandom(8).hex()}")
                    os.rename(each, waiting[-1], src_dir_fd=opened, dst_dir_fd=directory)
                else:
                    os.unlink(each, dir_fd=opened)
        finally:
            os.close(opened)
        os.rmdir(name, dir_fd=directory)


def _open(directory: int, path: bytes, flags: int, resolve: int) -> int:
    how = bytearray(_OPEN_HOW.pack(flags, 0, resolve))
    return libc.syscall("openat2", directory, path, how, _OPEN_HOW.size)

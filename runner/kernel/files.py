"""Opening files that somebody hostile made: openat2(2)."""

import struct

from . import libc

_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_OPEN_HOW = struct.Struct("=QQQ")


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """Open `path` beneath `directory`, through no link and into no other mount; raises OSError."""
    how = libc.buffer(_OPEN_HOW.pack(flags, 0, _RESOLVE))
    return libc.syscall("openat2", directory, path, how, _OPEN_HOW.size)

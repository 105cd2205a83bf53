"""The index of git, gitformat-index(5): whether two versions differ in more than what git remembers of
the files' times.

`git status` outside, such as one of an editor, rewrites the index without a change that anybody made.
"""

import os
import struct
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from ...user_data import replace_file
from .upper import open_file

INDEX = ".git/index"
_MOST_BYTES = 64 << 20
_HEADER = struct.Struct(">4sII")
_MODE, _HASH, _FLAGS, _NAME = 24, 40, 60, 62  # where they begin in an entry
_HAS_MORE_FLAGS = 0x4000


def keep_index(project: int, kept: Path) -> None:
    """Copy the index of the project to the file `kept`; remove that if there is none to copy."""
    try:
        replace_file(kept, _read(project))
    except (OSError, ValueError):
        kept.unlink(missing_ok=True)


def is_only_refreshed(project: int, kept: Path) -> bool:
    """Tell whether the project's index has the same entries as the one that was kept."""
    try:
        entries = zip_longest(_entries(_read(project)), _entries(kept.read_bytes()))
        return all(one == other for one, other in entries)
    except (OSError, ValueError, struct.error):  # it is missing, or of a version that is not known
        return False


def _read(project: int) -> bytes:
    file = open_file(project, INDEX)
    with open(file, "rb") as opened:
        if os.fstat(file).st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        return opened.read(_MOST_BYTES)


def _entries(data: bytes) -> Iterator[bytes]:
    """Yield mode, hash, flags and name of each entry; raises ValueError, struct.error."""
    signature, version, count = _HEADER.unpack_from(data)
    if signature != b"DIRC" or version not in (2, 3):
        raise ValueError("an unknown version")
    start = _HEADER.size
    for _ in range(count):
        (flags,) = struct.unpack_from(">H", data, start + _FLAGS)
        name = start + _NAME + (2 if flags & _HAS_MORE_FLAGS else 0)
        end = data.index(b"\0", name)
        yield data[start + _MODE : start + _MODE + 4] + data[start + _HASH : end]
        start += (end - start + 8) & ~7  # with 1 to 8 NULs

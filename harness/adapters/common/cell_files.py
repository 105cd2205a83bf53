"""Files anywhere in a cell, as its program sees them: with its rights, through its links.

The text of this module is executed in the cell (`harness/sandbox/programs/background_processes.py`):
it imports no module of cellwright, and the host trusts no answer of it.
"""

import base64
import errno
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

_LISTED_BYTES = 128 * 1024  # bytes in one page of a directory listing


def answer(function: str, *arguments: Any) -> list[Any]:
    """Call a function below; return [0, its result], or [errno, the system's message]."""
    try:
        return [0, globals()[function](*arguments)]
    except OSError as error:
        return [error.errno or errno.EIO, str(error.strerror or error)]
    except ValueError as error:  # a NUL in a path
        return [errno.EINVAL, str(error)]


def _opened(path: str, flags: int) -> int:
    """Open a regular file; nothing else, and without waiting for the other end of a FIFO."""
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    kind = os.fstat(opened).st_mode
    if stat.S_ISREG(kind):
        return opened
    os.close(opened)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "Not a regular file")


def read(path: str, offset: int, size: int) -> list[Any]:
    """Return a part of a file in base64, and the size of the whole."""
    opened = _opened(path, os.O_RDONLY)
    try:
        data = os.pread(opened, size, offset)
        return [base64.b64encode(data).decode(), os.fstat(opened).st_size]
    finally:
        os.close(opened)


def take(paths: list[str], size: int) -> list[list[Any]]:
    """Return the beginning of each file as `read` does, and remove the files that it contains
    completely; the size of a missing file is -1."""
    taken: list[list[Any]] = []
    for path in paths:
        try:
            taken.append(read(path, 0, size))
            if taken[-1][1] <= size:
                os.unlink(path)
        except FileNotFoundError:
            taken.append(["", -1])
    return taken


def write(path: str, data: str) -> None:
    """Write a file, and the directories that it is in."""
    _write(path, lambda opened: _write_all(opened, base64.b64decode(data)))


def move(source: str, path: str) -> None:
    """Write a file with the content of `source`, which is removed in any case."""
    try:
        with open(source, "rb") as content:
            _write(path, lambda opened: _copy(content, opened))
    finally:
        os.unlink(source)


def _write(path: str, fill: Callable[[int], None]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        opened = _opened(path, flags)
    except FileNotFoundError:
        if not os.path.dirname(path) or os.path.isdir(os.path.dirname(path)):
            raise  # a dangling link
        os.makedirs(os.path.dirname(path), exist_ok=True)
        opened = _opened(path, flags)
    try:
        fill(opened)
    finally:
        os.close(opened)


def _write_all(opened: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(opened, data[written:])


def _copy(source: Any, opened: int) -> None:
    with open(opened, "wb", closefd=False) as target:
        shutil.copyfileobj(source, target, 1024 * 1024)


def status(path: str, listed_as: str = "") -> list[Any]:
    """Return the path of a file, whether it is a directory, its size and modification time. A link
    is followed; a dangling one is described itself."""
    try:
        found = os.stat(path)
    except OSError:
        if not listed_as:
            raise
        found = os.lstat(path)
    is_directory = stat.S_ISDIR(found.st_mode)
    size = found.st_size if stat.S_ISREG(found.st_mode) else -1
    return [listed_as or path, is_directory, size, found.st_mtime]


def listed(path: str, after: str) -> list[Any]:
    """Return the entries of a directory whose names come after `after`, and whether there are more."""
    entries: list[list[Any]] = []
    size = 0
    for name in sorted(os.listdir(path)):
        if name <= after:
            continue
        readable = os.fsencode(name).decode(errors="replace")
        size += 100 + 6 * len(readable)
        if size > _LISTED_BYTES and entries:
            return [entries, True]
        try:
            entries.append(status(os.path.join(path, name), readable))
        except FileNotFoundError:  # removed meanwhile
            continue
    return [entries, False]


def make_directory(path: str) -> None:
    """Make a directory, and those that it is in."""
    os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
    """Remove a file or a link, or a directory with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def resolve(path: str) -> str:
    """Return the absolute path without links."""
    return os.path.realpath(path)

"""The files of a session's own file systems, copied into a fresh cell.

The supervisor reads them through the descriptor of /workspace that it holds, as everything that a guest
made: no link is followed, and entries, levels, names, bytes and time are bounded.  A program in the
fresh cell writes them, so that its cell pays for them and nothing of the host is written.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..kernel.file_calls import open_beneath
from .workspace import MOST_LEVELS, PATH_CHARACTERS, room

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ENTRIES = 20_000
_SECONDS = 5.0
_BATCH_BYTES = 8 * 1024 * 1024
_HEAD_BYTES = 8
_BLOCK_BYTES = 512  # unit of st_blocks (stat(2))
_CHANGES = "its files change while they are copied"
_MODE = 0o700  # mode of a fresh file system, until a guest changes it
# tmpfs counts so much for each name in a directory (BOGO_DIRENT_SIZE in mm/shmem.c)
_ENTRY_BYTES = 20

# This program runs in the fresh cell before the cell becomes a copy, so it leaves only files. It makes
# an empty file without open(2): the listener answers each open, which takes most of the time of a small
# file.
WRITER = """\
import json, os, sys
data = sys.stdin.buffer.read()
at = 8 + int.from_bytes(data[:8], "little")
for kind, path, mode, times, detail in json.loads(data[8:at]):
    path = path.encode("latin-1")
    if kind == "link":
        os.symlink(detail.encode("latin-1"), path)
    elif kind == "directory" and not os.path.isdir(path):
        os.mkdir(path, 0o700)
    elif kind == "file":
        size, pieces = detail
        if size:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            for offset, length in pieces:
                if os.pwrite(opened, data[at : at + length], offset) != length:
                    raise OSError(28, "no space left")
                at += length
            os.ftruncate(opened, size)
            os.close(opened)
        else:
            os.mknod(path, 0o600)
    if kind != "directory":
        if kind == "file":
            os.chmod(path, mode)
        os.utime(path, ns=tuple(times), follow_symlinks=False)
    if kind == "finished":
        os.chmod(path, mode)
"""


class Uncopied(Exception):  # noqa: N818 - no error: the session is branched in another way
    """A file of a session cannot be copied, and why."""


class _Entry(NamedTuple):
    kind: str
    path: str  # path in the cell; its bytes decoded as latin-1
    mode: int
    times: tuple[int, int]
    detail: object = None


def is_untouched(workspace: int, places: tuple[str, ...]) -> bool:
    """Tell whether the file systems of a cell mounted at `places` are empty, with their first mode."""
    for place in places:
        root = _open_root(workspace, place)
        try:
            status = os.fstat(root)
            if status.st_size > 2 * _ENTRY_BYTES or stat.S_IMODE(status.st_mode) != _MODE:
                return False
        finally:
            os.close(root)
    return True


def batches(workspace: int, places: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the content of the directories as standard input for WRITER, several times; raises
    Uncopied."""
    batch = _Batch()
    directories: list[_Entry] = []
    deadline = time.monotonic() + _SECONDS
    for place in places:
        root = _open_root(workspace, place)
        try:
            yield from _walk(root, place, batch, directories, deadline)
        finally:
            os.close(root)
    for each in reversed(directories):  # deepest first: writing changes the times of a directory
        batch.entries.append(each._replace(kind="finished"))
    yield batch.take()


def _open_root(workspace: int, place: str) -> int:
    """Open a file system of a cell. They lie side by side in a root that no guest can write to."""
    return os.open(f"..{place}", _FLAGS | os.O_DIRECTORY, dir_fd=workspace)


class _Batch:
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.data: list[bytes] = []
        self.size = 0

    def add_file(self, entry: _Entry, size: int, pieces: list[tuple[int, int]]) -> None:
        self.entries.append(entry._replace(kind="file", detail=(size, pieces)))

    def take(self) -> bytes:
        """Return the collected items, and start again with none."""
        head = json.dumps(self.entries).encode()
        taken = b"".join((len(head).to_bytes(_HEAD_BYTES, "little"), head, *self.data))
        self.entries, self.data, self.size = [], [], 0
        return taken


def _walk(
    root: int, place: str, batch: _Batch, directories: list[_Entry], deadline: float
) -> Iterator[bytes]:
    top = os.fstat(root)
    device, left = top.st_dev, room(root)
    directories.append(_entry(place, b"", top))
    waiting = [(b".", 0)]
    count = characters = 0
    while waiting:
        directory, level = waiting.pop()
        for path, status, link in _entries(root, directory):
            count += 1
            characters += len(path) + len(link)
            if characters > PATH_CHARACTERS:
                raise Uncopied("the paths and links of its files are too long to copy them")
            if count > _ENTRIES or level >= MOST_LEVELS or time.monotonic() > deadline:
                raise Uncopied("it has too many files, or directories too deep, to copy them")
            if status.st_dev != device:
                continue  # mounted there by the policy
            entry = _entry(place, path, status)
            if stat.S_ISDIR(status.st_mode):
                directories.append(entry)
                waiting.append((path, level + 1))
                batch.entries.append(entry)
            elif stat.S_ISLNK(status.st_mode):
                batch.entries.append(entry._replace(kind="link", detail=link.decode("latin-1")))
            else:
                left -= status.st_blocks * _BLOCK_BYTES
                if left < 0:
                    raise Uncopied(_CHANGES)
                yield from _file(root, path, status, entry, batch)


def _entries(root: int, directory: bytes) -> Iterator[tuple[bytes, os.stat_result, bytes]]:
    """Yield the path below `root`, the status, and the target if it is a link, of each entry of a
    directory."""
    opened = open_beneath(root, directory, _FLAGS | os.O_DIRECTORY)
    try:
        for text in os.listdir(opened):
            name = os.fsencode(text)
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            link = os.readlink(name, dir_fd=opened) if stat.S_ISLNK(status.st_mode) else b""
            yield (name if directory == b"." else directory + b"/" + name), status, link
    finally:
        os.close(opened)


def _entry(place: str, path: bytes, status: os.stat_result) -> _Entry:
    whole = place.encode() + b"/" + path
    times = (status.st_atime_ns, status.st_mtime_ns)
    return _Entry("directory", whole.decode("latin-1"), stat.S_IMODE(status.st_mode), times)


def _file(
    root: int, path: bytes, status: os.stat_result, entry: _Entry, batch: _Batch
) -> Iterator[bytes]:
    """Add a regular file to the batch, and yield a batch whenever it is full."""
    if not stat.S_ISREG(status.st_mode):
        raise Uncopied(f"a special file cannot be copied: {entry.path!a}")
    if status.st_nlink != 1:
        raise Uncopied(f"a file with several names cannot be copied: {entry.path!a}")
    if not status.st_size:
        batch.add_file(entry, 0, [])
        return
    opened = open_beneath(root, path, _FLAGS)
    try:
        pieces: list[tuple[int, int]] = []
        for start, data in _content(opened, status):
            pieces.append((start, len(data)))
            batch.data.append(data)
            batch.size += len(data)
            if batch.size >= _BATCH_BYTES:
                batch.add_file(entry, status.st_size, pieces)
                yield batch.take()
                pieces = []
        batch.add_file(entry, status.st_size, pieces)
    finally:
        os.close(opened)


def _content(opened: int, status: os.stat_result) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a file's content with their offsets; raises Uncopied if the content does not
    match `status`.

    Else a program that fills it before us, or cuts it, would have us read for ever.
    """
    left = status.st_blocks * _BLOCK_BYTES
    for offset, length in _stretches(opened, status.st_size):
        left -= length
        for start in range(offset, offset + length, _BATCH_BYTES):
            size = min(_BATCH_BYTES, offset + length - start)
            data = os.pread(opened, size, start)
            if left < 0 or len(data) != size:
                raise Uncopied(_CHANGES)
            yield start, data


def _stretches(opened: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where a file has data, as offset and length (lseek(2), SEEK_DATA)."""
    at = 0
    while at < size:
        try:
            start = os.lseek(opened, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the file is one hole
                return
            raise
        at = os.lseek(opened, start, os.SEEK_HOLE)
        yield start, at - start

"""Root file systems out of archives: what a tar says is written below one directory, and nowhere else.

The archive may be hostile.  A name never leads out of the directory, also through links; devices and
pipes are left out, and so are owners, set-uid bits and the right to write for others.
"""

import contextlib
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ....policies.errors import PolicyError
from ....runner.kernel import files
from ..archive import ArchiveBytes, TarMember, entries

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"  # image-spec, "layer.md"
_GZIP = b"\x1f\x8b"
_WINDOW = 16 + zlib.MAX_WBITS  # with the header of gzip
_CHUNK = 1024 * 1024
_READ = 64 * 1024  # each member of a gzip file copies the rest of a piece
_DEEPEST = 100
_MOST_EMPTY = 1000  # members of a gzip file without content, of which no program writes many
_REGULAR, _HARD_LINK, _SYMBOLIC_LINK, _DIRECTORY = "0", "1", "2", "5"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class UnpackLimits(NamedTuple):
    """What may become of all archives of one root file system."""

    total_bytes: int = 4 << 30
    members: int = 500_000
    seconds: float = 900.0  # a path through many links takes the kernel a millisecond for each name


class Unpacking:
    """Writes archives below one directory, one after the other."""

    def __init__(self, place: Path, limits: UnpackLimits = UnpackLimits()) -> None:  # noqa: B008
        self._place = place
        self._left = limits.total_bytes
        self._members = limits.members
        self._seconds = limits.seconds
        self._end = time.monotonic() + limits.seconds
        self._root = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    def add(self, archive: BinaryIO, name: str) -> None:
        """Write what the archive holds, as a layer over what was written before; `name` is its own.

        Raises PolicyError if it is malformed or larger than the limits.
        """
        try:
            with self._uncompressed(archive) as data:
                if not len(data):
                    raise ValueError("it is empty")
                for entry in entries(data, self._members):
                    self._members -= 1
                    self._write(entry, data)
        except (ValueError, zlib.error) as error:  # also an invalid number, or a name not in UTF-8
            raise PolicyError(f"rootfs: {name}: {str(error)[:300]}") from None
        except OSError as error:
            raise PolicyError(f"rootfs: {name}: {error.strerror}") from None

    @contextlib.contextmanager
    def _uncompressed(self, archive: BinaryIO) -> Iterator[ArchiveBytes]:
        magic = archive.read(4)
        archive.seek(0)
        if magic[:2] != _GZIP:
            yield _FileBytes(archive)
            return
        scratch = self._place.with_name(f"{self._place.name}.tar")
        try:
            with open(scratch, "x+b") as plain:
                self._expand(archive, plain)
                plain.flush()
                yield _FileBytes(plain)
        finally:
            scratch.unlink(missing_ok=True)

    def _expand(self, archive: BinaryIO, plain: BinaryIO) -> None:
        """Expand gzip, of one or several members (RFC 1952), up to what is left of the limit."""
        left, decoder = self._left + (self._members << 10), zlib.decompressobj(_WINDOW)
        data, empty, start = archive.read(_READ), 0, 0
        while data:
            made = decoder.decompress(data, _CHUNK)
            left -= len(made)
            if left < 0:
                raise ValueError("it expands to more bytes than the limit")
            plain.write(made)
            data = decoder.unconsumed_tail or decoder.unused_data
            if decoder.eof:
                empty += plain.tell() == start
                if empty > _MOST_EMPTY:
                    raise ValueError(f"more than {_MOST_EMPTY} members of its gzip are empty")
                decoder, start = zlib.decompressobj(_WINDOW), plain.tell()
            data = data or archive.read(_READ)
        plain.write(decoder.flush())  # less than a window

    def _write(self, entry: TarMember, data: ArchiveBytes) -> None:
        names = [name for name in entry.name.split("/") if name not in ("", ".")]
        if ".." in names:
            raise ValueError(f"a name leads upwards: {entry.name!r}")
        if len(names) > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} directories above a file")
        if time.monotonic() > self._end:
            raise ValueError(f"it takes more than {self._seconds:g} seconds")
        if not names:
            return
        directory = self._directory(names[:-1])
        try:
            self._put(entry, directory, names[-1], data)
        finally:
            os.close(directory)

    def _directory(self, names: list[str]) -> int:
        """Open a directory below the root, making what is missing, through links that stay below."""
        for count in range(len(names), 0, -1):
            path = "/".join(names[:count])
            try:
                opened = files.open_inside(self._root, os.fsencode(path), _FOLDER)
                break
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{path!r} cannot be a directory: {error.strerror}") from None
        else:
            count, opened = 0, os.dup(self._root)
        for name in names[count:]:
            above = opened
            try:
                os.mkdir(name, 0o755, dir_fd=above)
                opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
        return opened

    def _put(self, entry: TarMember, directory: int, name: str, data: ArchiveBytes) -> None:
        if name == _OPAQUE:
            for each in os.listdir(directory):
                _remove(directory, each)
        elif name.startswith(_WHITEOUT):
            _remove(directory, name.removeprefix(_WHITEOUT))
        elif entry.kind == _DIRECTORY:
            if not _is_directory(directory, name):
                _remove(directory, name)
                os.mkdir(name, 0o755, dir_fd=directory)
            os.chmod(name, (entry.mode & 0o755) | 0o700, dir_fd=directory)
        elif entry.kind == _SYMBOLIC_LINK:
            _remove(directory, name)
            os.symlink(entry.target, name, dir_fd=directory)
        elif entry.kind == _REGULAR:
            self._put_file(directory, name, _Content(data, entry.start, entry.size), entry.mode)
        elif entry.kind == _HARD_LINK:
            with self._linked(entry.target) as file:
                data, mode = _FileBytes(file), os.fstat(file.fileno()).st_mode
                self._put_file(directory, name, _Content(data, 0, len(data)), mode)

    def _put_file(self, directory: int, name: str, content: "_Content", mode: int) -> None:
        self._left -= content.size
        if self._left < 0:
            raise ValueError("it holds more bytes than the limit")
        _remove(directory, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
        with open(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            for at in range(content.start, content.start + content.size, _CHUNK):
                end = min(at + _CHUNK, content.start + content.size)
                file.write(content.data[at:end])
            os.fchmod(file.fileno(), (mode & 0o755) | 0o600)

    @contextlib.contextmanager
    def _linked(self, target: str) -> Iterator[BinaryIO]:
        """Open a file that the archive has already: links become copies."""
        path = os.fsencode(target.lstrip("/"))
        flags = os.O_RDONLY | os.O_NONBLOCK | _NO_LINK
        with open(files.open_inside(self._root, path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > self._left:
                raise ValueError(f"a link leads to no file that it may: {target!r}")
            yield file


class _Content(NamedTuple):
    """The content of a file: bytes of an archive, or of another file."""

    data: ArchiveBytes
    start: int
    size: int


class _FileBytes:
    """The bytes of an open file, read as they are asked for: a mapping would count as our memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._size = os.fstat(self._descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)


def _is_directory(directory: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _remove(directory: int, name: str) -> None:
    if name in ("", ".", ".."):
        raise ValueError(f"no name of a file: {name!r}")
    if _is_directory(directory, name):
        files.remove_tree(directory, name)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)

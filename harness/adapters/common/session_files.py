"""`CellFiles`: files anywhere in the cell of a session, with the errors that Python has for files."""

import base64
import binascii
import errno
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....policies.errors import PolicyError, SessionLost, WorkspaceError
from ....policies.policy import Limits
from ...sandbox.programs.background_processes import code_calling, value_told
from ...sandbox.sessions.session import Session

_MODULE = Path(__file__).with_name("cell_files.py")
_INLINE_BYTES = 128 * 1024  # a larger file is uploaded
_READ_BYTES = 384 * 1024  # bytes of a file read in one call; 512 KiB as base64
_MOST_LISTED = 100_000  # entries of a directory
_FEWEST_LISTED = 50  # entries on each page but the last
_WORKSPACE = "/workspace"


class FileStatus(NamedTuple):
    """The cell's report of a file; a link is reported as its target.

    path: of a listed file its name
    size: bytes; -1 for all but regular files
    modified: seconds since 1970
    """

    path: str
    is_directory: bool
    size: int
    modified: float


class CellFiles:
    """Files anywhere in the cell, as its programs see them.

    A relative path begins at /workspace.  Every method raises the OSError that the program would get,
    such as FileNotFoundError, and SessionLost if the session is gone.  A program of the session can
    have them tell anything.
    """

    def __init__(self, session: Callable[[], Session], limits: Callable[[], Limits]) -> None:
        self._session = session
        self._limits = limits

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a regular file.

        Raises OSError with EFBIG if it has more than `max_bytes`, default `limits.workspace_bytes`.
        """
        most = self._limits().workspace_bytes if max_bytes is None else max_bytes
        data, size = self.read_start(path, most)
        if size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
        return data

    def read_start(self, path: str, max_bytes: int, start: bytes = b"") -> tuple[bytes, int]:
        """Return the first `max_bytes` of a regular file, and the size of the whole; `start` is what
        was read of it before."""
        parts, read = [start], len(start)
        while True:
            wanted = max(0, min(max_bytes - read, self._most_read()))
            text, size = self._ask(tuple[str, int], "read", path, read, wanted)
            parts.append(_decoded(text)[:wanted])
            read += len(parts[-1])
            if read >= min(size, max_bytes):
                return b"".join(parts), max(size, read)
            # otherwise a cell could slow the host by sending one byte at a time
            if len(parts[-1]) < wanted:
                raise OSError(errno.EIO, "changed while it was read", path)

    def take(self, paths: Sequence[str], max_bytes: int) -> list[tuple[bytes, int]]:
        """Return the first `max_bytes` of each file with the size of the whole, and remove them; the
        size of one that is not there is -1."""
        wanted = min(max_bytes, self._most_read() // max(1, len(paths)))
        first = self._ask(list[tuple[str, int]], "take", list(paths), wanted)
        if len(first) != len(paths):
            raise SessionLost("files: the cell told other files")
        return [
            self._rest(path, _decoded(text)[:wanted], size, max_bytes)
            for path, (text, size) in zip(paths, first, strict=True)
        ]

    def _rest(self, path: str, start: bytes, size: int, max_bytes: int) -> tuple[bytes, int]:
        if size <= len(start):
            return start, size
        try:
            return self.read_start(path, max_bytes, start)
        finally:
            self.remove(path)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and make the directories that it is in; a link is followed."""
        if len(data) <= _INLINE_BYTES:
            self._ask(None, "write", path, base64.b64encode(data).decode())
            return
        upload = f".cellwright-{secrets.token_hex(8)}"
        try:
            self._session().upload(upload, data)
        except PolicyError as error:
            raise OSError(errno.EFBIG, error.what, path) from None
        except WorkspaceError:
            self.remove(upload)
            raise OSError(errno.ENOSPC, "no room in the workspace", path) from None
        self._ask(None, "move", f"{_WORKSPACE}/{upload}", path)

    def status(self, path: str) -> FileStatus:
        """Return the status of a file or directory."""
        return self._ask(FileStatus, "status", path)  # type: ignore[no-any-return]

    def exists(self, path: str) -> bool:
        """Tell whether a file or directory exists; links are followed."""
        try:
            self.status(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            return False
        return True

    def listed(self, path: str) -> tuple[FileStatus, ...]:
        """Return the entries of a directory, sorted by name."""
        found: list[FileStatus] = []
        has_more = True
        while has_more:
            after = found[-1].path if found else ""
            page, has_more = self._ask(tuple[list[FileStatus], bool], "listed", path, after)
            if has_more and len(page) < _FEWEST_LISTED:
                raise SessionLost("files: the cell told a short page of a directory")
            found += page
            if len(found) > _MOST_LISTED:
                raise OSError(errno.E2BIG, f"more than {_MOST_LISTED} entries", path)
        return tuple(found)

    def make_directory(self, path: str) -> None:
        """Make a directory, and those that it is in; harmless if it is there."""
        self._ask(None, "make_directory", path)

    def remove(self, path: str) -> None:
        """Remove a file or a link, or a directory with all that is in it."""
        self._ask(None, "remove", path)

    def resolve(self, path: str) -> str:
        """Return the absolute path without links; components that are missing stay as they are."""
        return self._ask(str, "resolve", path)  # type: ignore[no-any-return]

    def _most_read(self) -> int:
        return max(2, min(_READ_BYTES, self._limits().value_bytes // 2))

    def _ask(self, kind: Any, function: str, path: str | list[str], *arguments: Any) -> Any:
        """Return the result of a function of the cell's module; raises the OSError that it reports."""
        result = self._session().execute(
            code_calling(_MODULE, "answer", function, path, *arguments)
        )
        number, told = value_told(tuple[int, Any], result, "files")
        if number == 0:
            return _converted(told, kind)
        if number not in errno.errorcode:
            number = errno.EIO
        raise OSError(number, str(told)[:200], path)


def _converted(told: object, kind: Any) -> Any:
    try:
        return msgspec.convert(told, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SessionLost(f"files: the cell told another thing: {error}") from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise SessionLost("files: the cell told no base64") from None

"""`BuildContext`: the directory whose files COPY and ADD take.

The directory is the caller's, but a Dockerfile and links in it may come from anywhere: a source is
found from a descriptor of the directory, and never outside it.
"""

import contextlib
import errno
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....policies.errors import PolicyError
from ....runner.kernel.file_calls import open_inside
from .copy_archive import CopyArchive
from .ignore_rules import IgnoreRules, translated

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MOST_TEXT = 1 << 20
_MOST_FOUND = 100_000


class ContextSource(NamedTuple):
    """A file or directory of the context, by its path there; "" is the context itself."""

    path: str
    is_directory: bool


class BuildContext:
    """An open context, and its .dockerignore; `dockerfile` may have one of its own beside it."""

    def __init__(self, path: str, dockerfile: str) -> None:
        self._root = _opened_root(path)
        try:
            self._ignored = IgnoreRules(_ignore_text(path, dockerfile))
        except ValueError as error:
            os.close(self._root)
            raise PolicyError(f".dockerignore: {error}") from None

    def close(self) -> None:
        os.close(self._root)

    def sources(self, pattern: str) -> list[ContextSource]:
        """Return what a source of COPY means, one file or directory unless it has wildcards.

        Raises ValueError.
        """
        path = posixpath.normpath("/" + pattern).lstrip("/")
        is_wild = any(each in path for each in "*?[\\")
        found = []
        for each in self._matching(path) if is_wild else [path]:
            if each and self._ignored.leaves_out(each):
                if not is_wild:
                    raise ValueError(f"{each!a} is left out by .dockerignore")
                continue
            found.append(ContextSource(each, self._is_directory(each)))
        return found

    def add(self, source: ContextSource, archive: CopyArchive) -> None:
        """Add a source to an archive; raises ValueError, OSError."""
        with self._opened(source.path, _DIRECTORY if source.is_directory else _READ) as opened:
            if not source.is_directory:
                archive.add_file(opened, posixpath.basename(source.path))
                return

            def leaves_out(path: str, is_tree: bool) -> bool:
                whole = posixpath.join(source.path, path)
                if is_tree:
                    return self._ignored.leaves_out_tree(whole)
                return self._ignored.leaves_out(whole)

            archive.add_directory(opened, leaves_out, is_context=not source.path)

    @contextlib.contextmanager
    def opened(self, source: ContextSource) -> Iterator[int]:
        """Open a file to read it; raises ValueError."""
        with self._opened(source.path, _READ) as opened:
            yield opened

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        try:
            opened = open_inside(self._root, os.fsencode(path or "."), flags)
        except OSError as error:
            raise ValueError(_why(path, error)) from None
        try:
            yield opened
        finally:
            os.close(opened)

    def _is_directory(self, path: str) -> bool:
        with self._opened(path, os.O_PATH | os.O_CLOEXEC) as found:
            mode = os.fstat(found).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"{path!a} is neither a file nor a directory")
        return stat.S_ISDIR(mode)

    def _matching(self, pattern: str) -> list[str]:
        """Return the paths that fit a pattern, in order."""
        found = [""]
        for part in pattern.split("/"):
            fitting = re.compile(translated(part))
            found = [
                posixpath.join(above, name)
                for above in found
                for name in self._names(above)
                if fitting.fullmatch(name)
            ]
            if len(found) > _MOST_FOUND:
                raise ValueError(f"{pattern!a} fits more than {_MOST_FOUND} files")
        return found

    def _names(self, path: str) -> list[str]:
        try:
            with self._opened(path, _DIRECTORY) as opened:
                return sorted(os.listdir(opened))
        except ValueError:  # a file
            return []


def _opened_root(path: str) -> int:
    if os.path.realpath(path) == "/":
        raise PolicyError("context: / is the host itself", "name the directory of a project")
    try:
        return os.open(path, _DIRECTORY)
    except OSError as error:
        raise PolicyError(f"context: {path}: {error.strerror}") from None


def _ignore_text(path: str, dockerfile: str) -> str:
    for place in (f"{dockerfile}.dockerignore", os.path.join(path, ".dockerignore")):
        with contextlib.suppress(FileNotFoundError):
            return read_small(place)
    return ""


def read_small(path: str) -> str:
    """Return the text of a small regular file; raises PolicyError, FileNotFoundError."""
    try:
        opened = os.open(path, _READ)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise PolicyError(f"{path}: not a regular file")
        data = os.read(opened, _MOST_TEXT + 1)
    finally:
        os.close(opened)
    if len(data) > _MOST_TEXT:
        raise PolicyError(f"{path}: larger than {_MOST_TEXT} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PolicyError(f"{path}: must be UTF-8") from None


def _why(path: str, error: OSError) -> str:
    if error.errno in (errno.EXDEV, errno.ELOOP):
        return f"{path!a} leads out of the context"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{path!a} is not in the context"
    return f"{path!a}: {error.strerror}"


def dockerfile_of(context: str, dockerfile: "str | os.PathLike[str] | None") -> str:
    """Return the path of the Dockerfile: that of the caller, or `Dockerfile` in the context."""
    return os.fspath(dockerfile) if dockerfile else str(Path(context, "Dockerfile"))

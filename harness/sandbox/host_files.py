"""`content_of_paths`: files and folders of the host, read for a call."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...policies.errors import PolicyError
from ...policies.policy import MIB
from ...runner.workspace import Executable
from .checks import MAX_FILES

_MOST_BYTES = 1024 * MIB  # whatever the workspace holds: it is read into memory


def content_of_paths(
    files: Mapping[str, str | bytes | os.PathLike[str]],
) -> dict[str, str | bytes]:
    """Return `files` with the content of the host's files in place of their paths.

    A folder becomes all files below it, with their paths; below the name "." they keep only these.
    Raises PolicyError for a file that cannot be read, and for what is neither file nor folder.
    """
    found: dict[str, str | bytes] = {}
    total = 0
    for name, given in files.items():
        pairs = _read(name, Path(given)) if isinstance(given, os.PathLike) else [(name, given)]
        for path, content in pairs:
            total += len(content)
            if path in found:
                raise PolicyError(f"files: {path!r} is given twice")
            if len(found) >= MAX_FILES or total > _MOST_BYTES:
                raise PolicyError(
                    f"files: more than {MAX_FILES} files or {_MOST_BYTES} bytes, at {path!r}",
                    "name what the program needs, or show the folder in filesystem.read of a policy",
                )
            found[path] = content
    return found


def _read(name: str, path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the file at `path`, or those below it, each with its path below /workspace."""
    try:
        if path.is_dir():
            yield from _read_folder(name, path)
        else:
            yield name, _content(path)
    except OSError as error:
        raise PolicyError(
            f"files: cannot read {error.filename or path}: {error.strerror}"
        ) from None


def _read_folder(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    top = folder.resolve()

    def fail(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail):
        folders.sort()
        for each in sorted([*files, *(each for each in folders if Path(place, each).is_symlink())]):
            path = Path(place, each)
            if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(top)):
                raise PolicyError(
                    f"files: {path} is a link that leads out of {folder}, or to a folder",
                    "pass what it leads to by a name of its own",
                )
            below = path.relative_to(folder).as_posix()
            yield below if name == "." else f"{name}/{below}", _content(path)


def _content(path: Path) -> bytes:
    """Return the content of a regular file, as an Executable if it is one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise PolicyError(f"files: {path} is neither a file nor a folder")
        content = file.read(_MOST_BYTES + 1)
    return Executable(content) if mode & stat.S_IXUSR else content

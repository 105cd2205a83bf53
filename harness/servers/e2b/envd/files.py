"""The service `filesystem.Filesystem`: files and directories of a cell."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from .calls import CallFailed, path_of, telling

_METADATA = "user.e2b."


def entry_of(path: str) -> dict[str, Any]:
    found = os.lstat(path)
    is_link = stat.S_ISLNK(found.st_mode)
    shown = found
    if is_link:
        with contextlib.suppress(OSError):
            shown = os.stat(path)
    kind = "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(shown.st_mode) else "FILE_TYPE_FILE"
    modified = datetime.fromtimestamp(found.st_mtime, timezone.utc)  # noqa: UP017 - of any Python
    entry: dict[str, Any] = {
        "name": os.path.basename(path), "type": kind, "path": path, "size": str(found.st_size),
        "mode": stat.S_IMODE(found.st_mode), "permissions": stat.filemode(found.st_mode),
        "owner": "user", "group": "user", "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
    }  # fmt: skip
    if is_link:
        entry |= {"symlinkTarget": os.path.realpath(path), "isSymlink": True}
    if metadata := metadata_of(path):
        entry["metadata"] = metadata
    return entry


def metadata_of(path: str) -> dict[str, str]:
    """Return the metadata of a file, which its extended attributes hold (xattr(7))."""
    with contextlib.suppress(OSError):
        names = os.listxattr(path, follow_symlinks=False)
        values = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in names
            if name.startswith(_METADATA)
        }
        return {
            name[len(_METADATA) :]: each.decode("utf-8", "replace") for name, each in values.items()
        }
    return {}


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise CallFailed for metadata that E2B refuses."""
    size = sum(len(_METADATA) + len(name) + len(value) for name, value in metadata.items())
    texts = "".join([*metadata, *metadata.values()])
    if size > 4096 or any(not 0 < len(name) <= 246 for name in metadata):
        raise CallFailed(
            "invalid_argument", "metadata: at most 246 characters a key, and 4096 in all"
        )
    if any(not " " <= sign <= "~" for sign in texts):
        raise CallFailed("invalid_argument", "metadata: must be printable ASCII")


def set_metadata(path: str, metadata: dict[str, str]) -> None:
    """Replace the metadata of a file."""
    for name in metadata_of(path):
        os.removexattr(path, _METADATA + name)
    try:
        for name, value in metadata.items():
            os.setxattr(path, _METADATA + name, value.encode())
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise CallFailed(
            "invalid_argument", "metadata: the files of cells hold it from Linux 6.6 on"
        ) from None


def status_of(request: dict[str, Any]) -> dict[str, Any]:
    with telling():
        return {"entry": entry_of(path_of(request.get("path", "")))}


def make_directory(request: dict[str, Any]) -> dict[str, Any]:
    path = path_of(request.get("path", ""))
    with telling():
        if os.path.isdir(path):
            raise FileExistsError(17, "directory already exists", path)
        os.makedirs(path)
        return {"entry": entry_of(path)}


def move(request: dict[str, Any]) -> dict[str, Any]:
    source, target = path_of(request.get("source", "")), path_of(request.get("destination", ""))
    with telling():
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return {"entry": entry_of(target)}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    path = path_of(request.get("path", ""))
    with telling(), contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return {}


def list_directory(request: dict[str, Any]) -> dict[str, Any]:
    path, depth = path_of(request.get("path", "")), int(request.get("depth") or 1)
    with telling():
        if not os.path.isdir(path):
            os.stat(path)
            raise CallFailed("invalid_argument", f"path is not a directory: {path}")
        return {"entries": [entry_of(each) for each in below(path, depth)]}


def below(path: str, depth: int) -> Iterator[str]:
    for name in sorted(os.listdir(path)):
        each = os.path.join(path, name)
        yield each
        if depth > 1 and os.path.isdir(each) and not os.path.islink(each):
            yield from below(each, depth - 1)

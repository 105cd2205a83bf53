"""A cache on disk of answers that are expensive to compute.

The cache is the user's own (0700).  A file that another user could have written is not read, and
without a home directory nothing is kept.  Answers depend on policies, kernels and versions, so the
oldest are removed when there are many.
"""

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...policies.digest import digest
from ..messages import decode

T = TypeVar("T")
_MAX_BYTES = 1024 * 1024
_MOST = 256  # cached answers of some 16 KiB each; cleaning keeps half as many
_NAME = "[0-9a-f]{64}([.].*)?"  # compiled when it is used; names of answers and temporary files


def cached(key: str, kind: type[T], compute: Callable[[], T]) -> T:
    """Return the answer kept under `key`, or compute it and keep it."""
    directory = _directory()
    if directory is None:
        return compute()
    file = f"{directory}/{digest(key.encode()).hex()}"
    found = _read(file, kind)
    if found is None:
        found = compute()
        _write(file, found)
    return found


def _directory() -> str | None:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    if not os.path.isabs(home):
        return None
    directory = os.path.join(home, "cellwright")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        return directory if _ours(os.lstat(directory)) else None
    except OSError:
        return None


def _ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(file: str, kind: type[T]) -> T | None:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            ours = _ours(os.fstat(opened.fileno()))
            kept: T | None = decode(opened.read(_MAX_BYTES), kind) if ours else None
            return kept
    except (OSError, msgspec.DecodeError):  # a bad disk, a truncated file, or an older version
        return None


def _write(file: str, value: object) -> None:
    """Keep `value`; a full or read-only disk only costs time later."""
    temporary = f"{file}.{os.getpid()}.{threading.get_ident()}"
    try:
        with open(temporary, "xb") as opened:
            opened.write(msgspec.msgpack.encode(value))
        os.replace(temporary, file)
        _make_room(os.path.dirname(file))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _make_room(directory: str) -> None:
    """Remove the oldest answers if there are many, and temporary files of processes that ended."""
    with os.scandir(directory) as entries:
        kept = [entry for entry in entries if re.fullmatch(_NAME, entry.name)]
    if len(kept) > _MOST:
        kept.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
        for entry in kept[: -_MOST // 2]:
            os.unlink(entry)

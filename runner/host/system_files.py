"""The host's files of `filesystem.system_files`: those paths of the list that exist here and are safe.

Root alone decides what such a path is, and everybody may read it, so it holds nothing that only this
user may read.
"""

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...policies.compiling.host import SystemFile
from ...policies.policy import SYSTEM_PLACES, lies_in


class SystemPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path, perhaps with wildcards, and the reason why programs need it."""

    path: str
    reason: str
    execute: bool = False


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: tuple[SystemPath, ...]


def system_paths() -> tuple[SystemPath, ...]:
    """Return the paths of system_files.toml; equal on every host."""
    import tomllib  # most policies need no list

    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return msgspec.convert(data, _Document).file


def find_system_files() -> tuple[SystemFile, ...]:
    """Return the system files of this host, sorted by path, each with the place that it leads to."""
    found = {each.path: each for listed in system_paths() for each in _matches(listed)}
    return tuple(found[path] for path in sorted(found))


def _matches(listed: SystemPath) -> Iterator[SystemFile]:
    for path in glob.glob(listed.path):
        source = os.path.realpath(path)
        if (
            lies_in(source, SYSTEM_PLACES)
            and is_roots_and_public(path)
            and is_roots_and_public(source)
        ):
            yield SystemFile(path, source, listed.execute)


def is_roots_and_public(path: str) -> bool:
    """Tell whether root alone decides what `path` is, and everybody may read it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if status.st_uid != 0:
        return False
    if stat.S_ISLNK(status.st_mode):  # a link's mode means nothing; its directory belongs to root
        return True
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    changeable = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0)
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return plain and status.st_mode & wanted == wanted and not status.st_mode & changeable

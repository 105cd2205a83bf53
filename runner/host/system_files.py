"""The host's files of `filesystem.system_files`: those paths of the list that exist here and are safe.

Root alone decides what such a path is, and everybody may read it, so it holds nothing that only this
user may read.
"""

import glob
import os
import stat
from collections.abc import Iterator

from ...policies.host import SystemFile
from ...policies.policy import SYSTEM_PLACES, lies_in
from ...policies.system_files import SystemPath, system_paths


def find_system_files() -> tuple[SystemFile, ...]:
    """Return the system files of this host, sorted by path, each with the place that it leads to."""
    found = {each.path: each for listed in system_paths() for each in _matches(listed)}
    return tuple(found[path] for path in sorted(found))


def _matches(listed: SystemPath) -> Iterator[SystemFile]:
    for path in glob.glob(listed.path):
        source = os.path.realpath(path)
        if (
            lies_in(source, SYSTEM_PLACES)
            and _is_roots_and_public(path)
            and _is_roots_and_public(source)
        ):
            yield SystemFile(path, source, listed.execute)


def _is_roots_and_public(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if status.st_uid != 0:
        return False
    if stat.S_ISLNK(status.st_mode):  # its mode says nothing; its directory is root's
        return True
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    changeable = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0)
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return plain and status.st_mode & wanted == wanted and not status.st_mode & changeable

"""Root file systems: a directory of the host whose files cells in a container see, read-only, at /."""

import os
import stat
from typing import NamedTuple

from ...policies.errors import PolicyError
from ...policies.policy import lies_in
from ..fixed_root import NETWORK_TEXTS, TEXTS

# Cells have their own of these, or nothing there; /boot is for machines.
_NOT_SHOWN = ("proc", "sys", "dev", "run", "tmp", "workspace", "boot", ".cellwright")
_OWN_TEXTS = frozenset((*TEXTS, *NETWORK_TEXTS))
_ETC = "/etc"
_MOST_ENTRIES = 10_000


class RootFilesystem(NamedTuple):
    """What cells see of a root file system, by their own paths."""

    directory: str
    trees: tuple[str, ...]  # directories and files at the top, that the container shows whole
    files: tuple[str, ...]  # what of these cells see: all but the files of /etc that are their own
    links: tuple[tuple[str, str], ...]

    def has(self, path: str) -> bool:
        """Tell whether `path` is of this root file system, and not of the host."""
        return lies_in(path, self.trees) or lies_in(path, tuple(link for link, _ in self.links))


def open_rootfs(given: str) -> RootFilesystem:
    """Look at the directory `given`; raises PolicyError if another user can change it."""
    directory = os.path.realpath(given)
    _check(given, directory)
    trees: list[str] = []
    files: list[str] = []
    links: list[tuple[str, str]] = []
    for entry in _entries(directory):
        place = f"/{entry.name}"
        if entry.name in _NOT_SHOWN:
            continue
        if entry.is_symlink():
            links.append((place, os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            trees.append(place)
            if place != _ETC:
                files.append(place)
    if _ETC in trees:
        for entry in _entries(directory + _ETC):
            place = f"{_ETC}/{entry.name}"
            if place in _OWN_TEXTS:
                continue
            if entry.is_symlink():
                links.append((place, os.readlink(entry.path)))
            elif entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                files.append(place)
    if not trees:
        raise PolicyError(
            f"rootfs: there is no directory in {given}", "name the root of a file system"
        )
    return RootFilesystem(directory, tuple(trees), tuple(files), tuple(links))


def _check(given: str, directory: str) -> None:
    try:
        found = os.stat(directory)
    except OSError as error:
        raise PolicyError(f"rootfs: {given}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise PolicyError(f"rootfs: must be a directory, an OCI image layout or a tar, got {given}")
    if directory == "/":
        raise PolicyError(
            "rootfs: must not be the host's own root", "give no rootfs to use its Python"
        )
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(
            f"rootfs: {given} can be changed by another user",
            "let it belong to you or to root, and be writable by its owner only",
        )


def _entries(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        entries = [entry for _, entry in zip(range(_MOST_ENTRIES + 1), found, strict=False)]
    if len(entries) > _MOST_ENTRIES:
        raise PolicyError(f"rootfs: {directory} has more than {_MOST_ENTRIES} entries")
    return sorted(entries, key=lambda entry: entry.name)

"""The one resolver of host paths that cells are shown.

A path is resolved once, when a policy meets the host.  From then on the launcher opens the resolved
path without following links (openat2(2), RESOLVE_NO_SYMLINKS): a link that appears there later is
an error.  Resolving follows only links that no program in a cell can have made or moved: links of
root, in a directory that only root may change.
"""

import errno
import os
import stat
from collections.abc import Iterable, Mapping

from ...policies.errors import PolicyError
from ...policies.policy import Policy, lies_in, named_paths
from ..fixed_root import SYSTEM

_MOST_LINKS = 40  # the kernel's limit (path_resolution(7))


def sources_of(policy: Policy) -> dict[str, str]:
    """Return the resolved host path of each path that `policy` shows.

    Raises PolicyError, naming the policy's field, for a path that does not exist and is not optional,
    that this user may not look up, that leads through a link which another user may have made, or that
    is a pipe or a socket, unless the program may write it.
    """
    optional = frozenset(policy.filesystem.optional)
    paths = [
        (where, path)
        for where, path in named_paths(policy)
        if path not in optional or os.path.lexists(path)
    ]
    sources = {path: resolve(where, path) for where, path in paths}
    for where, path in paths:
        if path not in policy.filesystem.write and is_channel(sources[path]):
            raise PolicyError(
                f"{where}: {path} is a named pipe or a socket: a program that opens it acts on the "
                "process behind it",
                "name it in filesystem.write; for a socket also unix_sockets in syscalls.groups",
            )
    return sources


def is_channel(path: str) -> bool:
    """Tell whether `path` is a named pipe or a socket: mounts do not make those read-only."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # removed meanwhile; the launcher reports it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def shows_sockets(policy: Policy, sources: Mapping[str, str]) -> bool:
    """Tell whether cells see a directory in which processes of the host can have Unix sockets, now or
    later, or such a socket itself.

    Directories of packages (`python.path`) do not count: no program puts sockets there.
    """
    files = policy.filesystem
    shown = (
        sources.get(path, path) for path in (*files.read, *files.write, *policy.processes.execute)
    )
    return any(not lies_in(path, SYSTEM) and not os.path.isfile(path) for path in shown)


def resolve(where: str, path: str) -> str:
    """Return the absolute `path` with its links resolved; raises PolicyError as `sources_of` does,
    naming `where`."""
    links = 0
    done, rest = "/", _names(path)
    while rest:
        name = rest.pop(0)
        if name == "..":  # only a link can contain it, because paths of a policy have none
            done = os.path.dirname(done)
            continue
        here = os.path.join(done, name)
        status = _status(where, path, here)
        if not stat.S_ISLNK(status.st_mode):
            done = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise PolicyError(
                f"{where}: {path}: {here} leads through more than {_MOST_LINKS} links"
            )
        target = os.readlink(here)
        if not _is_roots_own(done, status):
            raise PolicyError(
                f"{where}: {path}: a program could have made the symbolic link {here}",
                f"name the directory or file itself: it leads to {os.path.realpath(path)} now",
            )
        done = "/" if target.startswith("/") else done
        rest = _names(target) + rest
    return done


def leads(path: str) -> str:
    """Return the target of `path`, an interpreter or library of this installation. A user who can
    change these links already controls the executed code."""
    return os.path.realpath(path)


def is_open_to_cells(path: str, *, for_writing: bool = False) -> bool:
    """Tell whether programs may use the shown `path` for its mode: in cells of root they have an id
    that owns nothing on the host."""
    needed = (0o5 if os.path.isdir(path) else 0o4) | (0o2 if for_writing else 0)
    return os.access(path, needed) if os.geteuid() else os.stat(path).st_mode & needed == needed


def lead_elsewhere(paths: Iterable[str]) -> dict[str, str]:
    """Return the paths that are reached through links, with their targets."""
    return {path: real for path in paths if (real := leads(path)) != path}


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _status(where: str, path: str, here: str) -> os.stat_result:
    try:
        return os.lstat(here)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            missing = "" if here == path else f": there is no {here}"
            raise PolicyError(f"{where}: {path} does not exist on this host{missing}") from None
        raise PolicyError(
            f"{where}: {path}: {here} cannot be looked up by uid {os.geteuid()}: {error.strerror}"
        ) from None


def _is_roots_own(directory: str, link: os.stat_result) -> bool:
    """Return whether a link is root's and only root can replace it."""
    above = os.stat(directory)
    foreign = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if link.st_uid or above.st_uid or foreign:
        return False
    return os.geteuid() == 0 or not os.access(directory, os.W_OK)

"""The host id of cells that root starts."""

import os
from collections.abc import Iterable

from ...policies.digest import digest
from ...policies.errors import LaunchError
from ..cgroups.cgroup_tree import read

# Above every id that distributions use (systemd's UIDS-GIDS.md: unused from 0x70000000). Each living
# process of a pid namespace has an id of its own for cells, so that no two share a uid's quotas.
_FIRST = 0x70000000
_ABOVE_PIDS = 1 << 22  # the largest pid_max of proc(5)
_SHARED_OUT = 1024  # ids at the end of a container's range, below 65534 (nobody)


def id_for(user: int | str | None) -> int:
    """Return the id for cells that this process starts as root: `user` itself if it is a number;
    for a name, an id that is the same in every process; else an id of this process alone.

    Raises LaunchError for an id that is not mapped here, and in a container whose root has no other
    id: cells never run as root.
    """
    maps = [read(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
    if user is None:
        return choose_id(os.getpid(), maps)
    if isinstance(user, str):
        hashed = digest(user.encode("utf-8", "surrogatepass"))
        return choose_id(_ABOVE_PIDS + int.from_bytes(hashed[:3], "big"), maps)
    if not all(any(user in ids for ids in _ids(text)) for text in maps):
        raise LaunchError(f"user: {user} is not mapped here", "see user_namespaces(7), uid_map")
    return user


def choose_id(pid: int, maps: Iterable[str]) -> int:
    """Return an id that both maps have (user_namespaces(7)), distinct for each process if possible."""
    every = [_ids(text) for text in maps]
    wanted = [_FIRST + pid, *(last - 2 - pid % _SHARED_OUT for last in _ends(every)), *_ends(every)]
    for number in wanted:
        if number > 0 and all(any(number in ids for ids in ranges) for ranges in every):
            return number
    raise LaunchError(
        "root has no other id here that cells could have",
        "start it as an ordinary user, or map more ids into the container",
    )


def _ends(every: list[list[range]]) -> list[int]:
    return [ids[-1] for ranges in every for ids in ranges]


def _ids(text: str) -> list[range]:
    """Return the ids of a uid_map, for each line: first inside, first outside, count."""
    lines = [[int(number) for number in line.split()] for line in text.splitlines()]
    return [range(first, first + count) for first, _, count in lines]

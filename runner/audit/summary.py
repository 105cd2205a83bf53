"""The summary of an audit trail: counts of its records, and of the hosts that programs asked for."""

import collections
import os
from collections.abc import Iterable
from typing import Any

from .record import AuditEntry, plain
from .verification import read

_MOST_HOSTS = 20  # of each kind: programs choose the names
_MOST_COUNTED = 10_000
_NAME_LIMIT = 260


def summary_of(entries: Iterable[AuditEntry]) -> dict[str, Any]:
    """Return the number of entries, by category and level, and the number of refusals.

    If programs used the network, also the connections to each host and port, and how often each name
    or connection was refused, the most frequent ones.
    """
    counts: collections.Counter[Any] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    for entry in entries:
        counts[
            entry.allowed, entry.level.name, entry.category, f"{entry.category}.{entry.action}"
        ] += 1
        if (entry.category, entry.action) == ("network", "connection"):
            _count(hosts, entry.target, 1)
        elif entry.category == "violation" and _is_of_network(entry):
            _count(refused, entry.target.replace(" ", ":"), entry.details.get("count"))

    def by(place: int) -> dict[Any, int]:
        sums: collections.Counter[Any] = collections.Counter()
        for what, count in counts.items():
            sums[what[place]] += count
        return dict(sums)

    return {
        "total_entries": counts.total(),
        "allowed": by(0).get(True, 0),
        "denied": by(0).get(False, 0),
        "by_level": by(1),
        "by_category": by(2),
        "by_action": by(3),
        **_most(connections=hosts, refused_hosts=refused),
    }


def _is_of_network(entry: AuditEntry) -> bool:
    return str(entry.details.get("rule", "")).startswith("network: ")


def _count(found: "collections.Counter[str]", name: str, times: object) -> None:
    key = plain(name, _NAME_LIMIT)
    if key not in found and len(found) >= _MOST_COUNTED:
        key = "others"
    found[key] += times if isinstance(times, int) else 1


def _most(**found: "collections.Counter[str]") -> dict[str, dict[str, int]]:
    return {name: dict(each.most_common(_MOST_HOSTS)) for name, each in found.items() if each}


def summary_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the same counts for a trail on disk."""
    return summary_of(read(path))

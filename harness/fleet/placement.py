"""The choice of a node for a call: pure, so that it can be tested without nodes."""

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

PackageSet = frozenset[str]


class NodeLoad(NamedTuple):
    """A node as the router sees it: its free slots, and sets of packages that it has launchers for."""

    name: str
    free: int
    packages: Collection[PackageSet] = ()


def chosen(nodes: Sequence[NodeLoad], packages: PackageSet, chance: random.Random) -> str | None:
    """Return the name of a node with a free slot, None if no node has one.

    Nodes that have used this set of packages come first: another one would build it anew, which
    takes seconds.  Of two random ones the one with more free slots is taken, which is nearly as even
    as the best of all, and does not send every caller to the same node (Mitzenmacher, The Power of
    Two Choices in Randomized Load Balancing, 2001).
    """
    free = [node for node in nodes if node.free > 0]
    if packages:
        free = [node for node in free if packages in node.packages] or free
    if not free:
        return None
    return max(chance.sample(free, min(2, len(free))), key=lambda node: node.free).name

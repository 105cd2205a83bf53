"""Caps on memory, CPU and processes by control groups, v1 and v2 (cgroups(7)).

A `CgroupTree` belongs to one supervisor; it makes one `Cgroup` per cell.  What the host lacks is said
in words by `CgroupTree.missing`, and the policy decides whether a cell may do without.
"""

from .detect import open_tree
from .tree import Cgroup, CgroupTree, NoCgroups, Usage

__all__ = ["Cgroup", "CgroupTree", "NoCgroups", "Usage", "open_tree"]

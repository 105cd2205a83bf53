"""Caps on memory, CPU and processes by control groups, v1 and v2 (cgroups(7)).

A `CgroupTree` belongs to one supervisor and makes one `Cgroup` for each cell.  `CgroupTree.missing`
says in words what the host lacks; the policy decides whether a cell may run without it.
"""

from .detect import open_tree
from .tree import Cgroup, CgroupTree, CgroupUsage, NoCgroups

__all__ = ["Cgroup", "CgroupTree", "CgroupUsage", "NoCgroups", "open_tree"]

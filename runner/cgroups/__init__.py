"""Caps on memory, CPU and processes by control groups, v1 and v2 (cgroups(7)).

A `CgroupTree` belongs to one supervisor and makes one `Cgroup` for each cell. `CgroupTree.missing`
describes what the host lacks; the policy decides whether a cell may run without it.
"""

from .cgroup_tree import Cgroup, CgroupTree, CgroupUsage
from .detect import open_tree

__all__ = ["Cgroup", "CgroupTree", "CgroupUsage", "open_tree"]

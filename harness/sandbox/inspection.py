"""Inspection of the processes and cgroups behind a sandbox, for tests, benchmarks and the doctor.

Everything here may change with any version.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...policies.errors import PolicyError
from ...policies.plan import Plan
from ...runner.cells.pool import Pool
from ...runner.cgroups import CgroupTree
from ...runner.launching.generation import Generation
from ...runner.supervisor import Supervisor, Supervisors
from .local import LocalCells
from .sandbox import Sandbox

if TYPE_CHECKING:
    from .calls.sandbox_tools import SandboxTools
    from .workspaces.workspace_store import Workspaces


class LauncherPids(NamedTuple):
    """The processes that make cells; each is the parent of the next one."""

    keeper: int
    nursery: int
    launcher: int


class Inspection:
    """A look behind a sandbox that makes its own cells.  The first supervisor is that of the sandbox's
    `language`; the processes are those of its current launcher."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Raise PolicyError for a sandbox that uses the cells of a daemon."""
        if not isinstance(sandbox._cells, LocalCells):
            raise PolicyError("sandbox: its cells are a daemon's, which cannot be inspected")
        self._cells = sandbox._cells

    @property
    def supervisors(self) -> Supervisors:
        return self._cells._supervisors

    @property
    def supervisor(self) -> Supervisor:
        return self._cells.supervisor

    @property
    def pool(self) -> Pool:
        return self.supervisor._pool

    @property
    def generation(self) -> Generation:
        """The current launcher with its cells; another object once the launcher was replaced."""
        return self.supervisor.generation

    @property
    def no_freezer(self) -> str:
        """Why idle sessions cannot be frozen; empty if they can."""
        return self.generation.tree.no_freezer

    @property
    def forks(self) -> int:
        """How many cells the current launcher was asked for."""
        return self.generation.forks

    @property
    def cgroups(self) -> CgroupTree:
        return self.generation.tree

    @property
    def cgroup_directory(self) -> Path | None:
        """The directory of the cgroup v2 tree; None on cgroup v1, or without cgroups."""
        directory: str | None = getattr(self.cgroups, "_directory", None)
        return Path(directory) if directory else None

    def launcher_pids(self) -> LauncherPids:
        """Return the pids of the launcher's processes; raises LauncherLost if they have ended."""
        return LauncherPids(*self.generation.launcher.pids())

    def egress_pid(self) -> int | None:
        """Return the pid of the egress process, None while there is none."""
        egress = self._cells._egress
        return egress.process.pid if egress else None

    @property
    def plan(self) -> Plan:
        return self._cells.plan

    def init_pids(self) -> tuple[int, ...]:
        """Return the pids of the init processes of cells, those that wait ready included."""
        pids = self.launcher_pids()
        return tuple(each for each in children_of(pids.nursery) if each != pids.launcher)

    def cell_pids(self) -> tuple[int, ...]:
        """Return the pids of the main processes in cells."""
        return tuple(children_of(self.launcher_pids().launcher))

    def open_pidfds(self) -> tuple[int, ...]:
        """Return a pidfd of each launcher process, which the caller closes."""
        return tuple(os.pidfd_open(pid) for pid in self.launcher_pids())

    def open_sessions(self) -> int:
        """Return how many sessions have a cell."""
        sessions = self.supervisors._sessions
        return len(sessions._alive) if sessions else 0

    @property
    def sandbox_tools(self) -> "SandboxTools | None":
        """The object that answers the tool calls of programs."""
        return self._cells._admission._sandbox_tools

    def replace_workspaces(self, store: "Workspaces") -> "Workspaces":
        """Use another store from now on; return the one before."""
        before = self._cells.workspaces
        self._cells.__dict__["workspaces"] = store
        return before


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children, the oldest first; none of a process that has ended."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def inspect(sandbox: Sandbox) -> Inspection:
    """Return a look behind a sandbox; raises PolicyError if its cells are a daemon's."""
    return Inspection(sandbox)

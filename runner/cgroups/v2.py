"""cgroup v2: one tree, in a directory that this user owns or was delegated (cgroup-v2.rst)."""

import contextlib
import os

from .cgroup_tree import (
    CONTROLLERS,
    Caps,
    Cgroup,
    CgroupTree,
    give_up,
    let_go,
    make_all_held,
    read,
    read_field,
    remove_with_cells,
    write,
)
from .counters import CountedCgroup

_PERIOD_MICROSECONDS = 100_000
_AGAIN = {  # counters that only `renew` reads
    "processes": ("v2", "pids.current"),
    "memory": ("v2", "memory.current"),
    "kills": ("v2", "memory.events"),
    "refusals": ("v2", "pids.events"),
}
_COUNTERS = {
    "cpu": "cpu.stat",
    "memory_peak": "memory.peak",  # Linux 5.19; since 6.12 a descriptor can be reset
    "processes_peak": "pids.peak",  # Linux 6.6
}


class CgroupV2(CountedCgroup):
    """One cell's directory."""

    into_cgroup = True
    _parts = 1_000_000
    _again = _AGAIN

    def __init__(self, directory: str, caps: Caps, controllers: frozenset[str], owner: int) -> None:
        self._directory, self._controllers, self._owner = directory, controllers, owner
        counters = {name: f"{directory}/{file}" for name, file in _COUNTERS.items()}
        thawing = f"{directory}/cgroup.freeze", "0"
        super().__init__(caps, (directory,), counters, f"{directory}/memory.current", thawing)
        self.places = {"v2": directory}

    def _prepare(self, caps: Caps) -> tuple[list[str], int]:
        directory = self._directory
        if "memory" in self._controllers:
            write(f"{directory}/memory.max", str(caps.memory_bytes))
            write(f"{directory}/memory.oom.group", "1")
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                write(f"{directory}/memory.swap.max", "0")
        self._write_cpu_cap()
        if "pids" in self._controllers:
            write(f"{directory}/pids.max", str(caps.processes))
        _give(directory, self._owner)
        return [directory], os.O_RDONLY

    def _write_cpu_cap(self) -> None:
        if "cpu" in self._controllers:
            quota = int(self._caps.cpus * _PERIOD_MICROSECONDS)
            write(f"{self._directory}/cpu.max", f"{quota} {_PERIOD_MICROSECONDS}")

    def _times(self) -> tuple[int, int] | None:
        cpu = self._counters.fields("cpu")
        return (cpu["usage_usec"], cpu["user_usec"]) if "usage_usec" in cpu else None

    def _events(self, *, kills: bool) -> int:
        file, field = ("memory.events", "oom_kill") if kills else ("pids.events", "max")
        return read_field(f"{self._directory}/{file}", field) or 0

    def freeze(self) -> bool:
        self.retire()
        try:
            write(f"{self._directory}/cgroup.freeze", "1")
        except OSError:  # before Linux 5.2, or the cell has ended
            return False
        self._is_frozen = True
        return True

    def kill(self) -> None:  # works on frozen processes (cgroup-v2.rst, cgroup.freeze)
        self.retire()
        with contextlib.suppress(OSError):  # before Linux 5.14; init's end does it alone there
            write(f"{self._directory}/cgroup.kill", "1")


def _give(directory: str, owner: int) -> None:
    """Let `owner` move processes into `directory`, and nothing else (cgroup-v2.rst, "Delegation
    Containment"): being born there needs the same right."""
    if os.geteuid() == 0 and owner != 0:
        os.chown(f"{directory}/cgroup.procs", owner, -1)


class CgroupTreeV2(CgroupTree):
    """A supervisor's directory: the launcher in one child, each cell in a child of its own."""

    def __init__(self, directory: str, *, create: bool) -> None:
        """Use `directory`, which must hold no foreign process; with `create`, make it."""
        super().__init__("")
        self._directory = directory
        self._created = create
        self._held = make_all_held([directory] if create else [])
        self._owner = os.geteuid()
        self._launcher_directory = f"{directory}/launcher"
        self.places = {"v2": directory}
        self.no_freezer = "" if os.path.exists(f"{directory}/cgroup.freeze") else "needs Linux 5.2"
        available = frozenset(read(f"{directory}/cgroup.controllers").split())
        self._controllers = available & frozenset(CONTROLLERS)
        self.missing = {
            name: "" if name in available else f"not delegated to {directory}"
            for name in CONTROLLERS
        }

    def admit(self, keeper: int, uid: int) -> None:
        """Move `keeper`, and so its children, into a child cgroup, because of the "no internal
        processes" rule. Then enable the controllers for the cells beside it."""
        self._owner = uid
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._launcher_directory)
        write(f"{self._launcher_directory}/cgroup.procs", str(keeper))
        enabled = " ".join(f"+{name}" for name in sorted(self._controllers))
        write(f"{self._directory}/cgroup.subtree_control", enabled)
        _give(self._directory, uid)

    def create(self, name: str, caps: Caps) -> Cgroup:
        return CgroupV2(f"{self._directory}/{name}", caps, self._controllers, self._owner)

    def close(self) -> None:
        if self._created:
            give_up(self._directory)
            let_go(self._held)
        else:  # systemd ends the scope, but leaves a directory that still held a cell's
            remove_with_cells(self._directory)

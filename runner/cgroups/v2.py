"""cgroup v2: one tree, in a directory that this user owns or was delegated (cgroup-v2.rst)."""

import contextlib
import os

from .tree import (
    CONTROLLERS,
    Caps,
    Cgroup,
    CgroupUsage,
    Counters,
    give_up,
    may_have_events,
    open_all,
    read,
    read_field,
    read_number,
    remove,
    remove_with_cells,
    write,
)

_PERIOD_MICROSECONDS = 100_000
_COUNTERS = {
    "cpu": "cpu.stat",
    "memory_peak": "memory.peak",  # Linux 5.19
    "processes_peak": "pids.peak",  # Linux 6.6
}


class CgroupV2:
    """One cell's directory."""

    into_cgroup = True
    can_exceed = False

    def __init__(self, directory: str, caps: Caps, controllers: frozenset[str], owner: int) -> None:
        self._directory = directory
        self._is_frozen = False
        self._caps = caps
        self.places = {"v2": directory}
        self.descriptors: tuple[int, ...] = ()
        os.mkdir(directory)
        try:
            _set(directory, caps, controllers)
            _give(directory, owner)
            self.descriptors = open_all([directory], os.O_RDONLY)
            self._counters = Counters(
                {name: f"{directory}/{file}" for name, file in _COUNTERS.items()}
            )
        except BaseException:  # no memory, Ctrl-C: no caller would remove it
            self.close_descriptors()
            remove([directory])
            raise

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def cpu_seconds(self) -> float | None:
        return _seconds(self._counters.fields("cpu"), "usage_usec")

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        cpu, caps = self._counters.fields("cpu"), self._caps
        memory = self._counters.number("memory_peak")
        processes = self._counters.number("processes_peak")
        killed = refused = 0
        if not ended_well or may_have_events(memory, caps.memory_bytes):
            killed = read_field(f"{self._directory}/memory.events", "oom_kill") or 0
        if may_have_events(processes, caps.processes):
            refused = read_field(f"{self._directory}/pids.events", "max") or 0
        return CgroupUsage(
            cpu_user_seconds=_seconds(cpu, "user_usec"),
            cpu_system_seconds=_seconds(cpu, "system_usec"),
            memory_peak_bytes=memory,
            processes_peak=processes,
            killed_for_memory=killed,
            forks_refused=refused,
        )

    def memory_peak_bytes(self) -> int | None:
        return self._counters.number("memory_peak")

    def memory_bytes(self) -> int | None:
        return read_number(f"{self._directory}/memory.current")

    def has_exceeded(self) -> bool:
        return False

    def freeze(self) -> bool:
        try:
            write(f"{self._directory}/cgroup.freeze", "1")
        except OSError:  # before Linux 5.2, or the cell has ended
            return False
        self._is_frozen = True
        return True

    def thaw(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            with contextlib.suppress(OSError):  # the cell has ended
                write(f"{self._directory}/cgroup.freeze", "0")

    def kill(self) -> None:  # works on frozen processes (cgroup-v2.rst, cgroup.freeze)
        with contextlib.suppress(OSError):  # before Linux 5.14; init's end does it alone there
            write(f"{self._directory}/cgroup.kill", "1")

    def remove(self) -> bool:
        self._counters.close()
        return remove([self._directory])


def _set(directory: str, caps: Caps, controllers: frozenset[str]) -> None:
    if "memory" in controllers:
        write(f"{directory}/memory.max", str(caps.memory_bytes))
        write(f"{directory}/memory.oom.group", "1")
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            write(f"{directory}/memory.swap.max", "0")
    if "cpu" in controllers:
        quota = int(caps.cpus * _PERIOD_MICROSECONDS)
        write(f"{directory}/cpu.max", f"{quota} {_PERIOD_MICROSECONDS}")
    if "pids" in controllers:
        write(f"{directory}/pids.max", str(caps.processes))


def _seconds(fields: dict[str, int], name: str) -> float | None:
    return fields[name] / 1e6 if name in fields else None


def _give(directory: str, owner: int) -> None:
    """Let `owner` move processes into `directory`, and nothing else (cgroup-v2.rst, "Delegation
    Containment"): being born there needs the same right."""
    if os.geteuid() == 0 and owner != 0:
        os.chown(f"{directory}/cgroup.procs", owner, -1)


class CgroupTreeV2:
    """A supervisor's directory: the launcher in one child, each cell in a child of its own."""

    joined_by_write = 0

    def __init__(self, directory: str, *, create: bool) -> None:
        """Use `directory`, which must hold no foreign process; with `create`, make it."""
        if create:
            os.mkdir(directory)
        self._directory = directory
        self._created = create
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
        """Move `keeper`, and so what it forks, into a child, because of the "no internal processes"
        rule, and enable the controllers for the cells beside it."""
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
        else:  # systemd ends its scope, but leaves a directory in which a cell's still was then
            remove_with_cells(self._directory)

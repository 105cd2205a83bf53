"""cgroup v1: one hierarchy per controller, joined by a write (cgroup-v1/cgroups.rst)."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import os

from .tree import (
    CONTROLLERS,
    FREEZER_STATE,
    Caps,
    Cgroup,
    CgroupUsage,
    Counters,
    give_up,
    may_have_events,
    open_all,
    processes_in,
    read_field,
    read_number,
    remove,
    write,
)

_SOCKET_LIMIT = "memory.kmem.tcp.limit_in_bytes"
# The kernel's default, so that it need not be written; shorter ones overshoot more (measured).
_PERIOD_MICROSECONDS = 100_000
_PASSES = 16  # over the processes of a cell that is to be frozen, which may fork meanwhile
_COUNTERS = {
    "cpu_user": ("cpuacct", "cpuacct.usage_user"),
    "cpu_system": ("cpuacct", "cpuacct.usage_sys"),
    "memory_peak": ("memory", "memory.max_usage_in_bytes"),
    "processes_peak": ("pids", "pids.peak"),  # Linux 6.6
    "sockets": ("memory", "memory.kmem.tcp.usage_in_bytes"),
}


class CgroupV1:
    """One cell's directory in each hierarchy."""

    into_cgroup = False

    def __init__(self, directories: dict[str, str], caps: Caps, freezer: str = "") -> None:
        """`directories`: controller -> the directory to make; several may share one.

        `freezer` is a directory that is made when the cell is first frozen, which few are; empty if
        there is no hierarchy for it.
        """
        self._directories = directories
        self._freezer = freezer
        self.places = {**directories, "freezer": freezer} if freezer else directories
        self._is_frozen = False
        self._caps = caps
        self._unique = tuple(dict.fromkeys(directories.values()))
        self.descriptors: tuple[int, ...] = ()
        self._socket_bytes = caps.socket_bytes if "memory" in directories else 0
        try:
            for directory in self._unique:
                os.mkdir(directory)
            self._set(caps)
            # `tasks`, not `cgroup.procs`: a thread that moves itself does not take the kernel's global
            # lock, which after a pause costs a grace period of many milliseconds (measured; cgroup.c,
            # cgroup_procs_write_start).
            tasks = [f"{directory}/tasks" for directory in self._unique]
            self.descriptors = open_all(tasks, os.O_WRONLY)
            self._counters = Counters(
                {
                    name: f"{directories[controller]}/{file}"
                    for name, (controller, file) in _COUNTERS.items()
                    if controller in directories and (name != "sockets" or self._socket_bytes)
                }
            )
        except BaseException:  # no memory, Ctrl-C: no caller would remove it
            self.close_descriptors()
            remove(self._unique)
            raise

    def _set(self, caps: Caps) -> None:
        if memory := self._directories.get("memory"):
            write(f"{memory}/memory.limit_in_bytes", str(caps.memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                write(f"{memory}/memory.memsw.limit_in_bytes", str(caps.memory_bytes))
            if caps.socket_bytes:
                # The buffers of TCP and of UDP: counted apart, and only once this is set
                # (memcg1_tcpmem_active).
                write(f"{memory}/{_SOCKET_LIMIT}", str(caps.socket_bytes))
        if cpu := self._directories.get("cpu"):
            write(f"{cpu}/cpu.cfs_quota_us", str(int(caps.cpus * _PERIOD_MICROSECONDS)))
        if pids := self._directories.get("pids"):
            write(f"{pids}/pids.max", str(caps.processes))

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def cpu_seconds(self) -> float | None:
        user, system = self._counters.number("cpu_user"), self._counters.number("cpu_system")
        return None if user is None or system is None else (user + system) / 1e9

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        user, system = self._counters.number("cpu_user"), self._counters.number("cpu_system")
        memory, processes = (
            self._counters.number("memory_peak"), self._counters.number("processes_peak"),
        )  # fmt: skip
        killed = refused = 0
        if not ended_well or may_have_events(memory, self._caps.memory_bytes):
            killed = self._events("memory", "oom_control", "oom_kill")
        if may_have_events(processes, self._caps.processes):
            refused = self._events("pids", "events", "max")
        return CgroupUsage(
            cpu_user_seconds=None if user is None else user / 1e9,
            cpu_system_seconds=None if system is None else system / 1e9,
            memory_peak_bytes=memory,
            processes_peak=processes,
            killed_for_memory=killed,
            forks_refused=refused,
        )

    def _events(self, controller: str, file: str, field: str) -> int:
        directory = self._directories.get(controller)
        return read_field(f"{directory}/{controller}.{file}", field) or 0 if directory else 0

    def memory_peak_bytes(self) -> int | None:
        return self._counters.number("memory_peak")

    def memory_bytes(self) -> int | None:
        directory = self._directories.get("memory")
        return read_number(f"{directory}/memory.usage_in_bytes") if directory else None

    @property
    def can_exceed(self) -> bool:
        return self._socket_bytes > 0

    def has_exceeded(self) -> bool:
        """TCP grants each socket a segment of 64 KiB whatever the limit (__sk_mem_raise_allocated):
        2.3 GiB in ten seconds where the limit was 64 MiB (measured)."""
        used = self._counters.number("sockets") if self._socket_bytes else None
        return used is not None and used > 2 * self._socket_bytes

    def freeze(self) -> bool:
        """Move the processes into a cgroup that is frozen already: each stops as it enters, and what it
        has forked until then is moved next."""
        if not self._freezer:
            return False
        self._is_frozen = True
        try:
            os.makedirs(self._freezer, exist_ok=True)
            write(f"{self._freezer}/{FREEZER_STATE}", "FROZEN")
            for _ in range(_PASSES):
                if self._move_into_freezer():
                    return True
        except OSError:  # not ours to write
            pass
        self.thaw()
        return False

    def _move_into_freezer(self) -> bool:
        """Return whether all processes were there already."""
        there = processes_in(self._freezer)
        here = processes_in(self._unique[0])
        # A number may be another process's by the time that it is moved: that one goes back.
        moves = [(self._freezer, pid) for pid in here if pid not in there]
        moves += [(os.path.dirname(self._freezer), pid) for pid in there if pid not in here]
        for directory, pid in moves:
            with contextlib.suppress(ProcessLookupError):
                write(f"{directory}/cgroup.procs", str(pid))
        return not moves

    def thaw(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            with contextlib.suppress(OSError):
                write(f"{self._freezer}/{FREEZER_STATE}", "THAWED")

    def kill(self) -> None:
        """v1 has no cgroup.kill: forbid new processes, then kill the existing ones.

        A frozen process dies once it is thawed, before it executes anything of its own.
        """
        if pids := self._directories.get("pids"):
            with contextlib.suppress(OSError):
                write(f"{pids}/pids.max", "0")
        directory = self._unique[0]
        for pid in processes_in(directory):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                _kill_in(directory, pid)
        self.thaw()

    def remove(self) -> bool:
        self._counters.close()
        return remove((*self._unique, self._freezer) if self._freezer else self._unique)


class CgroupTreeV1:
    """A directory of this supervisor in each controller's hierarchy."""

    def __init__(self, hierarchies: dict[str, str], name: str, freezer: str | None = None) -> None:
        """`hierarchies`: controller -> the directory under which to make ours; `freezer` is that of
        the freezer, if there is one."""
        self._freezer = freezer and f"{freezer}/{name}"
        self.no_freezer = "" if freezer else "no writable cgroup v1 hierarchy has the freezer"
        self._places = {key: f"{path}/{name}" for key, path in hierarchies.items()}
        self.places = {**self._places, "freezer": self._freezer} if self._freezer else self._places
        self.missing = dict.fromkeys(CONTROLLERS, "")
        for controller in CONTROLLERS:
            if controller not in hierarchies:
                self.missing[controller] = f"no cgroup v1 hierarchy has the {controller} controller"
        for directory in self._unique():
            os.mkdir(directory)

    @property
    def joined_by_write(self) -> int:
        return len(self._unique())

    def _unique(self) -> list[str]:
        return list(dict.fromkeys(self._places.values()))

    def create(self, name: str, caps: Caps) -> Cgroup:
        places = {key: f"{path}/{name}" for key, path in self._places.items()}
        return CgroupV1(places, caps, f"{self._freezer}/{name}" if self._freezer else "")

    def admit(self, keeper: int, uid: int) -> None:
        """Move `keeper`, and so what it forks, into groups beside the cells: /proc/1/cgroup in a cell
        shows the way to its init's group, which must not lead through the host's groups.  Cells
        join through descriptors that the supervisor opened (since the fix of CVE-2021-4197 the
        opener's rights count)."""
        for directory in self._unique():
            launcher = f"{directory}/launcher"
            with contextlib.suppress(FileExistsError):
                os.mkdir(launcher)
            write(f"{launcher}/cgroup.procs", str(keeper))

    def close(self) -> None:
        for directory in self._unique():
            give_up(directory)
        if self._freezer:
            give_up(self._freezer)


def _kill_in(directory: str, pid: int) -> None:
    """Kill a process of this cgroup, but no process that reuses its number."""
    pidfd = os.pidfd_open(pid)
    try:
        if pid in processes_in(directory):
            _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
    finally:
        os.close(pidfd)

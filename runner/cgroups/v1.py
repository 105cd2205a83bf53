"""cgroup v1: one hierarchy per controller, joined by a write (cgroup-v1/cgroups.rst)."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import os

from .cgroup_tree import (
    CONTROLLERS,
    FREEZER_STATE,
    Caps,
    Cgroup,
    CgroupTree,
    give_up,
    let_go,
    make_all_held,
    processes_in,
    read_field,
    remove,
    write,
)
from .counters import CountedCgroup

_SOCKET_LIMIT = "memory.kmem.tcp.limit_in_bytes"
# The kernel's default, which need not be written. Shorter periods overshoot more (measured).
_PERIOD_MICROSECONDS = 100_000
_PASSES = 16  # passes over the processes of a cell that is frozen, because they may fork meanwhile
_AGAIN = {  # counters that only `renew` reads
    "processes": ("pids", "pids.current"),
    "memory": ("memory", "memory.usage_in_bytes"),
    "kills": ("memory", "memory.oom_control"),
    "refusals": ("pids", "pids.events"),
}
_COUNTERS = {
    # The scheduler counts this one, in nanoseconds.  usage_user and usage_sys grow by ticks of the
    # timer, and a program can sleep over those.
    "cpu": ("cpuacct", "cpuacct.usage"),
    "cpu_user": ("cpuacct", "cpuacct.usage_user"),
    "memory_peak": ("memory", "memory.max_usage_in_bytes"),
    "processes_peak": ("pids", "pids.peak"),  # Linux 6.6
    "sockets": ("memory", "memory.kmem.tcp.usage_in_bytes"),
}


class CgroupV1(CountedCgroup):
    """One cell's directory in each hierarchy."""

    _parts = 1_000_000_000
    _again = _AGAIN

    def __init__(self, directories: dict[str, str], caps: Caps, freezer: str = "") -> None:
        """`directories`: controller -> the directory to make; several may share one.

        `freezer` is a directory that is made when the cell is first frozen, which few are; empty if
        there is no hierarchy for it.
        """
        self._directories = directories
        self._freezer = freezer
        memory = directories.get("memory", "")
        self._socket_bytes = caps.socket_bytes if memory else 0
        self.can_exceed = self._socket_bytes > 0
        counters = {
            name: f"{directories[controller]}/{file}"
            for name, (controller, file) in _COUNTERS.items()
            if controller in directories and (name != "sockets" or self._socket_bytes)
        }
        super().__init__(
            caps, tuple(dict.fromkeys(directories.values())), counters,
            memory and f"{memory}/memory.usage_in_bytes", (f"{freezer}/{FREEZER_STATE}", "THAWED"),
        )  # fmt: skip
        self.places = {**directories, "freezer": freezer} if freezer else directories

    def _prepare(self, caps: Caps) -> tuple[list[str], int]:
        directories = self._directories
        if memory := directories.get("memory"):
            write(f"{memory}/memory.limit_in_bytes", str(caps.memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                write(f"{memory}/memory.memsw.limit_in_bytes", str(caps.memory_bytes))
            if caps.socket_bytes:
                # TCP and UDP buffers have a counter of their own, which counts only once this limit is
                # set (memcg1_tcpmem_active).
                write(f"{memory}/{_SOCKET_LIMIT}", str(caps.socket_bytes))
        self._write_cpu_cap()
        if pids := directories.get("pids"):
            write(f"{pids}/pids.max", str(caps.processes))
        # `tasks`, not `cgroup.procs`: a thread that moves itself does not take the kernel's global
        # lock, which after a pause costs a grace period of many milliseconds (measured; cgroup.c,
        # cgroup_procs_write_start).
        return [f"{directory}/tasks" for directory in self._made], os.O_WRONLY

    def _write_cpu_cap(self) -> None:
        if cpu := self._directories.get("cpu"):
            write(f"{cpu}/cpu.cfs_quota_us", str(int(self._caps.cpus * _PERIOD_MICROSECONDS)))

    def _times(self) -> tuple[int, int] | None:
        used, user = self._counters.number("cpu"), self._counters.number("cpu_user")
        return None if used is None else (used, user or 0)

    def _events(self, *, kills: bool) -> int:
        of = ("memory", "oom_control", "oom_kill") if kills else ("pids", "events", "max")
        controller, file, field = of
        directory = self._directories.get(controller)
        return read_field(f"{directory}/{controller}.{file}", field) or 0 if directory else 0

    def has_exceeded(self) -> bool:
        """TCP grants each socket a segment of 64 KiB whatever the limit (__sk_mem_raise_allocated):
        2.3 GiB in ten seconds where the limit was 64 MiB (measured)."""
        used = self._counters.number("sockets") if self._socket_bytes else None
        return used is not None and used > 2 * self._socket_bytes

    def freeze(self) -> bool:
        """Move the processes into a cgroup that is frozen already. Each stops when it enters;
        children that it has forked until then are moved next."""
        if not self._freezer:
            return False
        self.retire()
        self._is_frozen = True
        try:
            os.makedirs(self._freezer, exist_ok=True)
            write(f"{self._freezer}/{FREEZER_STATE}", "FROZEN")
            for _ in range(_PASSES):
                if self._move_into_freezer():
                    return True
        except OSError:  # no permission to write
            pass
        self.thaw()
        return False

    def _move_into_freezer(self) -> bool:
        """Return whether all processes were there already."""
        there = processes_in(self._freezer)
        here = processes_in(self._made[0])
        # The number may belong to another process by now; that process is moved back.
        moves = [(self._freezer, pid) for pid in here if pid not in there]
        moves += [(os.path.dirname(self._freezer), pid) for pid in there if pid not in here]
        for directory, pid in moves:
            with contextlib.suppress(ProcessLookupError):
                write(f"{directory}/cgroup.procs", str(pid))
        return not moves

    def kill(self) -> None:
        """v1 has no cgroup.kill: forbid new processes, then kill the existing ones.

        A frozen process dies once it is thawed, before it executes anything of its own.
        """
        self.retire()
        if pids := self._directories.get("pids"):
            with contextlib.suppress(OSError):
                write(f"{pids}/pids.max", "0")
        directory = self._made[0]
        for pid in processes_in(directory):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                _kill_in(directory, pid)
        self.thaw()

    def remove(self) -> bool:
        return super().remove() & remove([self._freezer] if self._freezer else [])


class CgroupTreeV1(CgroupTree):
    """A directory of this supervisor in each controller's hierarchy."""

    def __init__(self, hierarchies: dict[str, str], name: str, freezer: str | None = None) -> None:
        """`hierarchies`: controller -> the directory in which to make cgroups. `freezer`: the
        directory of the freezer, if there is one."""
        super().__init__("")
        self._freezer = freezer and f"{freezer}/{name}"
        self.no_freezer = "" if freezer else "no writable cgroup v1 hierarchy has the freezer"
        self._places = {key: f"{path}/{name}" for key, path in hierarchies.items()}
        self.places = {**self._places, "freezer": self._freezer} if self._freezer else self._places
        for controller in set(CONTROLLERS).difference(hierarchies):
            self.missing[controller] = f"no cgroup v1 hierarchy has the {controller} controller"
        self._unique = list(dict.fromkeys(self._places.values()))
        self.joined_by_write = len(self._unique)
        # The freezer's is made now: a sweep of another pid namespace may thaw what nobody holds.
        self._all = [*self._unique, *([self._freezer] if self._freezer else [])]
        self._held = make_all_held(self._all)

    def create(self, name: str, caps: Caps) -> Cgroup:
        places = {key: f"{path}/{name}" for key, path in self._places.items()}
        return CgroupV1(places, caps, f"{self._freezer}/{name}" if self._freezer else "")

    def admit(self, keeper: int, uid: int) -> None:
        """Move `keeper`, and so its children, into groups beside those of the cells. /proc/1/cgroup
        in a cell shows the relative path to init's group, which must not lead through the host's
        groups. Cells join through descriptors that the supervisor opened (since the fix of
        CVE-2021-4197 the opener's rights count)."""
        for directory in self._unique:
            launcher = f"{directory}/launcher"
            with contextlib.suppress(FileExistsError):
                os.mkdir(launcher)
            write(f"{launcher}/cgroup.procs", str(keeper))

    def close(self) -> None:
        for directory in self._all:
            give_up(directory)
        let_go(self._held)


def _kill_in(directory: str, pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        if pid in processes_in(directory):
            _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
    finally:
        os.close(pidfd)

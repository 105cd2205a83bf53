"""Answers to a guest that asks how large its machine is: files of /proc, made when they are opened, and
the calls sched_getaffinity(2) and sysinfo(2).

What a guest learns is its own: limits, use, processes.  The guest may change the path that is read
from its memory; it then gets another of these files.  The memory of a file is the supervisor's, so a
cell gets new content at a bounded rate, and beyond it a file with the last content again.
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterator

from ...policies.plan import Plan
from ..cgroups.tree import Cgroup
from ..kernel import notifications
from ..kernel.notifications import Notification
from ..machine import PAGE, SETTINGS, processors
from .giver import Give
from .guest_memory import write_bytes

_AT_ONCE_BYTES = 1024 * 1024
_BYTES_A_SECOND = 8192  # two files: what a guest keeps open grows by less than 30 MiB an hour
_MOST_BYTES = 256 * 1024  # of a table of sockets or mounts, which grows as the cell makes them
_KIB = 1024
_NOT_READING = os.O_ACCMODE | os.O_CREAT | os.O_DIRECTORY | os.O_PATH | os.O_TRUNC
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_TICKS = os.sysconf("SC_CLK_TCK")
_NETWORK = (
    "dev",
    "if_inet6",
    "netstat",
    "route",
    "sockstat",
    "snmp",
    "tcp",
    "tcp6",
    "udp",
    "udp6",
    "unix",
)
# Addresses of sockets in the kernel, which it tells a reader with CAP_SYSLOG where kptr_restrict is 1.
_POINTERS = {
    "unix": re.compile(rb"^[0-9a-f]{16}(?=:)", re.MULTILINE),
    "tcp": re.compile(rb"(?<= )[0-9a-f]{16}(?= )"),
    "udp": re.compile(rb"(?<= )[0-9a-f]{16}(?= )"),
}
_CONTROLLERS = ("cpuset", "cpu", "cpuacct", "memory", "pids")
_GROUP_MOUNT = b"0 0 0:0 / /sys/fs/cgroup ro,nosuid,nodev,noexec - cgroup2 cgroup2 rw\n"
_SYSINFO = struct.Struct("=q3Q6QHHI2QI4x")  # struct sysinfo of sysinfo(2)


class MachineFiles:
    """The files and answers of one cell."""

    def __init__(self, listener: int, plan: Plan, cgroup: Cgroup, give: Give) -> None:
        self._listener = listener
        self._give = give
        self._plan = plan
        self._cgroup = cgroup
        self._processors = processors(plan)
        self._room, self._counted_at = float(_AT_ONCE_BYTES), time.monotonic()
        self._last: dict[str, int] = {}  # path -> descriptor of the last file
        self._makers: dict[str, Callable[[int], bytes]] = {
            "/proc/cgroups": self._cgroups,
            "/proc/cpuinfo": self._cpuinfo,
            "/proc/diskstats": _empty,
            "/proc/filesystems": lambda _: (
                b"nodev\tproc\nnodev\ttmpfs\nnodev\tdevpts\nnodev\tcgroup2\n"
            ),
            "/proc/loadavg": lambda _: b"0.00 0.00 0.00 1/1 1\n",
            "/proc/meminfo": self._meminfo,
            "/proc/modules": _empty,
            "/proc/mounts": lambda thread: _of_process(thread, "mounts"),
            "/proc/partitions": _empty,
            "/proc/self/cgroup": lambda _: b"0::/\n",
            "/proc/self/mountinfo": lambda thread: _of_process(thread, "mountinfo") + _GROUP_MOUNT,
            "/proc/stat": self._stat,
            "/proc/swaps": lambda _: b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
            "/proc/uptime": self._uptime,
            "/proc/version": _version,
            "/proc/vmstat": lambda _: (
                b"pgpgin 0\npgpgout 0\npswpin 0\npswpout 0\npgfault 0\noom_kill 0\n"
            ),
            "/proc/sys/kernel/hostname": lambda _: f"{plan.hostname}\n".encode(),
            "/proc/sys/kernel/random/uuid": lambda _: _uuid(),
            "/sys/fs/cgroup/cpu.stat": self._cpu_stat,
            "/sys/fs/cgroup/memory.current": lambda _: b"%d\n" % self._memory_used(),
            "/sys/fs/cgroup/memory.stat": self._memory_stat,
        }
        self._makers |= {f"/proc/sys/{name}": _setting(name) for name in SETTINGS}
        self._makers |= {f"/proc/net/{name}": _network(name) for name in _NETWORK}

    def answer_open(self, notification: Notification, path: str, flags: int) -> bool:
        """Answer an open of `path` if it is one of the machine's; return whether it was."""
        if not path.startswith(("/proc/", "/sys/fs/")) or flags & _NOT_READING:
            return False
        path = os.path.normpath(path)
        if path.startswith("/proc/thread-self/"):
            path = path.replace("thread-self", "self", 1)
        make = self._makers.get(path)
        if make is None:
            return False
        try:
            content = make(notification.thread)
            if not notifications.is_waiting(self._listener, notification):
                return True  # the table may be another process's, and would be kept
            descriptor = self._opened(path, content)
        except OSError as error:
            notifications.refuse(self._listener, notification, error.errno or errno.EIO)
        else:
            self._give(notification, descriptor, flags & os.O_CLOEXEC)
        return True

    def answer_call(self, notification: Notification, call: str) -> None:
        """Answer a call that asks for the size of the machine; let the kernel answer where the guest's
        memory cannot be written."""
        answer = self._affinity if call == "sched_getaffinity" else self._sysinfo
        value = answer(notification)
        if value is None:
            notifications.let_go_on(self._listener, notification)
        else:
            notifications.succeed(self._listener, notification, value)

    def close(self) -> None:
        for descriptor in self._last.values():
            os.close(descriptor)
        self._last.clear()

    def _opened(self, path: str, content: bytes) -> int:
        """Return a new open file with `content`, which nobody can write to."""
        now = time.monotonic()
        self._room = min(_AT_ONCE_BYTES, self._room + (now - self._counted_at) * _BYTES_A_SECOND)
        self._counted_at = now
        kept = self._last.get(path, -1)
        size = len(content) // PAGE * PAGE + PAGE
        if kept < 0 or size <= self._room:
            self._room -= size
            made = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._last[path] = made
            if kept >= 0:
                os.close(kept)
            os.write(made, content)
            fcntl.fcntl(
                made, fcntl.F_ADD_SEALS, _SEALS
            )  # its mode lets a guest open it for writing
            kept = made
        return os.open(f"/proc/self/fd/{kept}", os.O_RDONLY | os.O_CLOEXEC)

    def _affinity(self, notification: Notification) -> int | None:
        """Write the set of the first processors that the thread may use: as many as the cell sees."""
        pid, size, address = notification.arguments[:3]
        if pid and pid not in _ids_of(notification.thread):
            return None  # another process: the kernel knows whether there is one
        try:
            allowed = sorted(os.sched_getaffinity(notification.thread))[: self._processors]
        except OSError:
            return None
        words = allowed[-1] // 64 + 1
        if size % 8 or size < words * 8:
            return None
        mask = sum(1 << number for number in allowed).to_bytes(words * 8, "little")
        return len(mask) if write_bytes(self._listener, notification, address, mask) else None

    def _sysinfo(self, notification: Notification) -> int | None:
        total, used = self._plan.memory_bytes, self._memory_used()
        up = int(time.clock_gettime(time.CLOCK_BOOTTIME))
        packed = _SYSINFO.pack(up, 0, 0, 0, total, total - used, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1)
        return (
            0
            if write_bytes(self._listener, notification, notification.arguments[0], packed)
            else None
        )

    def _memory_used(self) -> int:
        return min(self._cgroup.memory_bytes() or 0, self._plan.memory_bytes)

    def _meminfo(self, _: int) -> bytes:
        total, used = self._plan.memory_bytes // _KIB, self._memory_used() // _KIB
        sizes = {"MemTotal": total, "MemFree": total - used, "MemAvailable": total - used}
        none = (
            "Buffers", "Cached", "SwapCached", "Active", "Inactive", "SwapTotal", "SwapFree", "Dirty",
            "Writeback", "AnonPages", "Mapped", "Shmem", "Slab", "SReclaimable", "SUnreclaim",
            "PageTables", "CommitLimit", "Committed_AS", "VmallocTotal", "VmallocUsed",
            "HugePages_Total", "HugePages_Free",
        )  # fmt: skip
        sizes |= dict.fromkeys(none, 0)
        sizes |= {"Active": used, "AnonPages": used, "CommitLimit": total, "Hugepagesize": 2048}
        return "".join(f"{name + ':':<16}{size:>8} kB\n" for name, size in sizes.items()).encode()

    def _memory_stat(self, _: int) -> bytes:
        return b"anon %d\nfile 0\nkernel 0\ninactive_file 0\nactive_file 0\n" % self._memory_used()

    def _cpu_stat(self, _: int) -> bytes:
        used = int((self._cgroup.cpu_seconds() or 0) * 1_000_000)
        return b"usage_usec %d\nuser_usec %d\nsystem_usec 0\n" % (used, used)

    def _times(self) -> tuple[float, float]:
        """Return the seconds since the machine started, and those that its processors were idle."""
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return up, max(0.0, up * self._processors - (self._cgroup.cpu_seconds() or 0))

    def _uptime(self, _: int) -> bytes:
        up, idle = self._times()
        return f"{up:.2f} {idle:.2f}\n".encode()

    def _stat(self, _: int) -> bytes:
        up, idle = self._times()
        used = int((self._cgroup.cpu_seconds() or 0) * _TICKS)
        rest, each = int(idle * _TICKS), self._processors
        lines = [f"cpu  {used} 0 0 {rest} 0 0 0 0 0 0"]
        lines += [f"cpu{n} {used // each} 0 0 {rest // each} 0 0 0 0 0 0" for n in range(each)]
        lines += ["intr 0", "ctxt 0", f"btime {int(time.time() - up)}", "processes 1"]
        lines += ["procs_running 1", "procs_blocked 0", "softirq 0 0 0 0 0 0 0 0 0 0 0"]
        return ("\n".join(lines) + "\n").encode()

    def _cpuinfo(self, _: int) -> bytes:
        """Return the host's words about its first processor, once for each that the cell sees."""
        first = _read("/proc/cpuinfo").partition(b"\n\n")[0].splitlines()
        stanzas = [b"\n".join(self._numbered(first, number)) for number in range(self._processors)]
        return b"\n\n".join(stanzas) + b"\n\n"

    def _numbered(self, lines: list[bytes], number: int) -> Iterator[bytes]:
        for line in lines:
            name = line.partition(b":")[0]
            if name.strip() in (b"siblings", b"cpu cores"):
                yield name + b": %d" % self._processors
            elif name.strip() in (b"processor", b"core id", b"apicid", b"initial apicid"):
                yield name + b": %d" % number
            else:
                yield line

    def _cgroups(self, _: int) -> bytes:
        lines = "".join(f"{name}\t0\t1\t1\n" for name in _CONTROLLERS)
        return f"#subsys_name\thierarchy\tnum_cgroups\tenabled\n{lines}".encode()


def _ids_of(thread: int) -> set[int]:
    """Return the numbers of a thread and of its process in the cell."""
    lines = _read(f"/proc/{thread}/status").splitlines()
    return {int(line.split()[-1]) for line in lines if line.startswith((b"NSpid:", b"NStgid:"))}


def _empty(_: int) -> bytes:
    return b""


def _version(_: int) -> bytes:
    name = os.uname()
    return f"{name.sysname} version {name.release} {name.version}\n".encode()


def _uuid() -> bytes:
    import uuid  # seldom asked for

    return f"{uuid.uuid4()}\n".encode()


def _setting(name: str) -> Callable[[int], bytes]:
    return lambda _: _read(f"/proc/sys/{name}")


def _network(name: str) -> Callable[[int], bytes]:
    pattern = _POINTERS.get(name.removesuffix("6"))

    def make(thread: int) -> bytes:
        table = _of_process(thread, f"net/{name}")
        return pattern.sub(lambda found: b"0" * len(found[0]), table) if pattern else table

    return make


def _of_process(thread: int, name: str) -> bytes:
    """Read a file of the guest's own process: tables of its namespaces."""
    return _read(f"/proc/{thread}/{name}")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES)

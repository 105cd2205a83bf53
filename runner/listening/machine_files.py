"""Answers to a guest that asks how large its machine is: files of /proc, made when they are opened, and
the calls sched_getaffinity(2) and sysinfo(2).

A guest learns only about itself: limits, use, processes. The guest may change the path that is read
from its memory; it then gets another of these files (MemoryFiles).
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...policies.plan import Plan
from ..cgroups.cgroup_tree import Cgroup
from ..fixed_root import CELL_ID, PAGE, SETTINGS, processors
from ..kernel import notifications
from ..kernel.notifications import Notification
from .waiting_call import Give, write_bytes

_MOST_BYTES = 256 * 1024  # longest table of sockets or mounts, which a cell can make long
_KIB = 1024
_NOT_READING = os.O_ACCMODE | os.O_CREAT | os.O_DIRECTORY | os.O_PATH | os.O_TRUNC
# Writes have no effect: no core is dumped, and prctl(2) sets the slack.
_WITHOUT_EFFECT = re.compile(r"/proc/(?:self|thread-self|(\d+))/(?:coredump_filter|timerslack_ns)")
# libcuda names its threads there, and does not start if it cannot (CUDA 13.0): the names are not kept.
_COMM = re.compile(r"/proc/(?:self|thread-self|(\d{1,7}))(?:/task/(\d{1,7}))?/comm")
_TICKS = os.sysconf("SC_CLK_TCK")
_NETWORK = (
    "dev",
    "if_inet6",
    "igmp",
    "igmp6",
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
# Kernel addresses of sockets, which a reader with CAP_SYSLOG sees if kptr_restrict is 1; they are
# replaced.
_POINTERS = {
    "unix": re.compile(rb"^[0-9a-f]{16}(?=:)", re.MULTILINE),
    "tcp": re.compile(rb"(?<= )[0-9a-f]{16}(?= )"),
    "udp": re.compile(rb"(?<= )[0-9a-f]{16}(?= )"),
}
# The owner column is in the reader's user namespace and is translated to the cell's.
_OWNER = re.compile(
    rb"^( *\d+: (?:[0-9A-F]+:[0-9A-F]{4} ){2}(?:[0-9A-F:]+ ){4})( *\d+)", re.MULTILINE
)
_NO_ID = 65534  # owner of objects that no id of the cell owns (user_namespaces(7))
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
        self._files = MemoryFiles()
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
        if flags & os.O_ACCMODE and (found := _WITHOUT_EFFECT.fullmatch(path)):
            return self._answer_without_effect(notification, found[1], flags)
        if self._plan.devices and flags & os.O_ACCMODE and (found := _COMM.fullmatch(path)):
            return self._answer_without_effect(notification, found[1], flags, found[2])
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
                return True  # not cached, because the table may be another process's
            descriptor = self._files.open(path, content)
        except OSError as error:
            notifications.refuse(self._listener, notification, error.errno or errno.EIO)
        else:
            self._give(notification, descriptor, flags & os.O_CLOEXEC)
        return True

    def _answer_without_effect(
        self, notification: Notification, pid: str, flags: int, task: str = ""
    ) -> bool:
        try:
            if pid and int(pid) not in ids_of(notification.thread):
                return False
            if task and not _has_thread(notification.thread, task):
                return False
            descriptor = os.open(os.devnull, (flags & os.O_ACCMODE) | os.O_CLOEXEC)
        except OSError:  # the caller has ended, or this process is out of descriptors
            return False
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
        self._files.close()

    def _affinity(self, notification: Notification) -> int | None:
        """Write the set of the first processors that the thread may use: as many as the cell sees."""
        pid, size, address = notification.arguments[:3]
        if pid and pid not in ids_of(notification.thread):
            return None  # another process's file: the kernel answers
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


def ids_of(thread: int) -> set[int]:
    """Return the numbers of a thread and of its process in the cell."""
    lines = _read(f"/proc/{thread}/status").splitlines()
    return {int(line.split()[-1]) for line in lines if line.startswith((b"NSpid:", b"NStgid:"))}


def _has_thread(thread: int, number: str) -> bool:
    """Tell whether the process of `thread` has a thread of that number, by the /proc of its cell."""
    own = next(iter(ids_of(thread)))  # whichever: each leads to all threads of the process
    return os.path.isdir(f"/proc/{thread}/root/proc/{own}/task/{number}")


def _empty(_: int) -> bytes:
    return b""


def _version(_: int) -> bytes:
    name = os.uname()
    return f"{name.sysname} version {name.release} {name.version}\n".encode()


def _uuid() -> bytes:
    import uuid  # rarely needed

    return f"{uuid.uuid4()}\n".encode()


def _setting(name: str) -> Callable[[int], bytes]:
    return lambda _: _read(f"/proc/sys/{name}")


def _network(name: str) -> Callable[[int], bytes]:
    pattern = _POINTERS.get(name.removesuffix("6"))

    def make(thread: int) -> bytes:
        table = _of_process(thread, f"net/{name}")
        if not pattern:
            return table
        id_on_host = os.stat(f"/proc/{thread}").st_uid
        table = pattern.sub(lambda found: b"0" * len(found[0]), table)
        return _OWNER.sub(lambda line: _with_owner(line, id_on_host), table)

    return make


def _with_owner(line: re.Match[bytes], id_on_host: int) -> bytes:
    """Return the line of a socket with the owner as the cell knows it."""
    owner = CELL_ID if int(line[2]) == id_on_host else _NO_ID
    return line[1] + b"%*d" % (len(line[2]), owner)


def _of_process(thread: int, name: str) -> bytes:
    """Read a file of the guest's own process: tables of its namespaces."""
    return _read(f"/proc/{thread}/{name}")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES)


_MOST_MEMORY_BYTES = 1024 * 1024
_MOST_FILES = 80  # each takes a descriptor of the supervisor
_MOST_OPEN = 4096  # each takes 192 bytes of kernel memory (measured)
_LOOK_SECONDS = 0.1  # pause between two looks at open files, 2 µs each
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(slots=True)
class _File:
    descriptor: int
    size: int
    opened: int = 0  # how often it was opened in the cell


class MemoryFiles:
    """Sealed files in memory that the supervisor opens for one cell, bounded while open.

    The kernel charges an open file, and its pages, to the process that opened it: the supervisor,
    whatever the cell then keeps (a mapping keeps it without a descriptor).  So their number is bounded.
    A lease tells whether any process else has a file open (fcntl(2), F_SETLEASE); if none has, it is
    closed here.
    """

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._last: dict[str, _File] = {}  # the latest file by path
        self._looked_at = 0.0

    def open(self, path: str, content: bytes) -> int:
        """Return a new open file with `content`, or where there is no room with what `path` had last.

        Raises OSError, ENFILE if the cell keeps too many open.
        """
        size = len(content) // PAGE * PAGE + PAGE
        if not self._has_room(size):
            self._forget_closed()
        if self._count() >= _MOST_OPEN:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        if self._has_room(size):
            self._last[path] = _File(_sealed(content), size)
            self._files.append(self._last[path])
        elif path not in self._last:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        file = self._last[path]
        opened = _reopened(file.descriptor)
        file.opened += 1
        return opened

    def close(self) -> None:
        for file in self._files:
            os.close(file.descriptor)
        self._files.clear()
        self._last.clear()

    def _count(self) -> int:
        return sum(file.opened for file in self._files)

    def _has_room(self, size: int) -> bool:
        held = sum(file.size for file in self._files)
        is_full = len(self._files) >= _MOST_FILES or self._count() >= _MOST_OPEN
        return not is_full and held + size <= _MOST_MEMORY_BYTES

    def _forget_closed(self) -> None:
        now = time.monotonic()
        if now < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = now
        kept = [file for file in self._files if _is_open_elsewhere(file.descriptor)]
        for file in self._files:
            if file not in kept:
                os.close(file.descriptor)
        self._files = kept
        self._last = {path: file for path, file in self._last.items() if file in kept}


def _sealed(content: bytes) -> int:
    """Return a sealed file, open for reading: a lease requires both."""
    made = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(made, content)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)  # its mode lets a guest open it to write
        return _reopened(made)
    finally:
        os.close(made)


def _reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _is_open_elsewhere(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # also if leases are switched off (fs.leases-enable)
        return True
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False

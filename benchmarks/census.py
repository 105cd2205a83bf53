"""A census of what exists now: processes, cgroups, mounts, namespaces, descriptors, memory."""

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..harness.sandbox.inspection import LauncherPids, inspect
from ..harness.sandbox.sandbox import Sandbox

_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024
_M_ARENA_MAX = -8  # malloc.h
_CACHED = ("net:[", "anon_inode:[pidfd]", "/memfd:kept ")


class Census(NamedTuple):
    """Counts of what an execution could leave: of this process, of those that it started, and of what
    makes their cells.  The last of the counts and that of the objects are of the whole host."""

    processes: int
    cgroups: int
    # mounts of this process and of every keeper, nursery and launcher; the next two count likewise
    mounts: int
    net_namespaces: int  # network namespaces of every process
    descriptors: int
    threads: int  # counts this process only
    files: int  # cellwright's files in the directory for temporary files and in /dev/shm
    ipc_objects: int  # System V's, POSIX message queues, keys
    dying_cgroups: int  # removed, but something charged to them is there still
    memory_mib: float  # anonymous, of this process, without what is free in its heap
    launchers_mib: (
        float  # anonymous, of every keeper, nursery and launcher, shared with cells or not
    )


def count() -> Census:
    """Return what is there now; settle sandboxes first."""
    ours = os.getpid()
    _trim_heap()
    below = descendants(ours)
    machinery, cgroups = machinery_below(ours), _cgroups()
    return Census(
        processes=len(below),
        cgroups=_made_by({ours, *machinery}, cgroups),
        mounts=sum(_lines(f"/proc/{pid}/mountinfo") for pid in (ours, *machinery)),
        net_namespaces=len({_namespace(pid) for pid in below}),
        descriptors=len(_listed("/proc/self/fd")) + sum(map(_descriptors, machinery)),
        threads=len(_listed("/proc/self/task")),
        files=sum(
            name.startswith("cellwright")
            for place in (tempfile.gettempdir(), "/dev/shm")
            for name in _listed(place)
        ),
        ipc_objects=_ipc_objects(),
        dying_cgroups=_dying_cgroups(cgroups),
        memory_mib=_anonymous_bytes(ours) / _MIB,
        launchers_mib=sum(map(_anonymous_bytes, machinery)) / _MIB,
    )


def _descriptors(pid: int) -> int:
    """Return how many descriptors a trusted process holds, without caches of a bounded size: a nursery
    keeps at most 24 network namespaces, and the inits that had them (runner/launcher/inits.py), and
    the branching process the images of the last launchers (runner/branching/keeping.py)."""
    count = 0
    for name in _listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/{pid}/fd/{name}").startswith(_CACHED)
    return count


def machinery_below(pid: int) -> list[int]:
    """Return every process below `pid` that is trusted: none is an init or below a launcher."""
    return [each for role, each in roles_below(pid) if role not in (INIT, GUEST)]


OTHER, EGRESS, WORKER, KEEPER, NURSERY, LAUNCHER, INIT, GUEST = (
    "other", "egress", "worker", "keeper", "nursery", "launcher", "init", "guest",
)  # fmt: skip
_ROLES = {"cell-egress": EGRESS, "cell-worker": WORKER}  # by the name that a process gives itself


def roles_below(pid: int) -> Iterator[tuple[str, int]]:
    """Yield what every process below `pid` is, by where it stands; guests' children are left out."""
    for child in children(pid):
        if (name := _name(child)) != "cell-keeper":
            yield _ROLES.get(name, OTHER), child
            yield from roles_below(child)
            continue
        yield KEEPER, child
        for nursery in children(child):
            yield NURSERY, nursery
            for each in children(nursery):  # in no order: pids begin again
                if _name(each) != "cell-launcher":
                    yield INIT, each
                    continue
                yield LAUNCHER, each
                yield from ((GUEST, guest) for guest in children(each))


def launcher_of(sandbox: Sandbox) -> LauncherPids:
    """Return the pids of keeper, nursery and launcher."""
    return inspect(sandbox).launcher_pids()


def guests_of(sandbox: Sandbox) -> list[int]:
    """Return the pids of the guests' main processes."""
    return children(launcher_of(sandbox)[2])


def _name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").strip()


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, zombies included.

    /proc/PID/task/TID/children leaves out others where one of them ends meanwhile (proc(5)).
    """
    return [each for each, stat in every_process().items() if stat.parent == pid]


def descendants(pid: int) -> list[int]:
    """Return every process below `pid`, zombies included."""
    parents = {each: stat.parent for each, stat in every_process().items()}
    found = [pid]
    for above in found:
        found += [each for each, parent in parents.items() if parent == above]
    return found[1:]


def private_bytes(pid: int) -> int | None:
    """Return the memory that is this process's alone, None if the kernel does not say."""
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    private = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return sum(private) * 1024 if private else None


def use_one_heap() -> None:
    """Have all threads of this process allocate from one heap from now on.

    The C library gives threads eight heaps a processor, and keeps what each once needed: two hundred
    threads beside hostile programs leave 37 to 50 MiB resident, of which 13 are in use, always the
    same; with one heap it is 24 (measured).
    """
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        ctypes.PyDLL(None).mallopt(_M_ARENA_MAX, 1)


def _trim_heap() -> None:
    """Give back what is free in our heap."""
    with contextlib.suppress(AttributeError):
        ctypes.PyDLL(None).malloc_trim(0)


def _anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file's.  That a launcher shares some of it
    with cells changes from one moment to the next, and how much it has does not."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class ProcessStat(NamedTuple):
    """What the kernel counts of a process and of the children that it waited for (proc(5))."""

    parent: int
    session: int
    is_kernel_thread: bool
    faults: int  # minor and major
    children_faults: int
    seconds: float  # CPU seconds
    children_seconds: float


_PF_KTHREAD = 0x00200000  # include/linux/sched.h


def parse_stat(text: str) -> ProcessStat:
    """Return what `/proc/PID/stat` says; its second field is a name, in which anything may stand."""
    numbers = [int(field) for field in text.rpartition(")")[2].split()[1:15]]
    parent, _, session, _, _, flags = numbers[:6]
    minor, children_minor, major, children_major, user, system, waited_user, waited_system = (
        numbers[6:]
    )
    return ProcessStat(
        parent, session, bool(flags & _PF_KTHREAD), minor + major,
        children_minor + children_major, (user + system) / _TICKS,
        (waited_user + waited_system) / _TICKS,
    )  # fmt: skip


def stat_of(pid: int) -> ProcessStat | None:
    """Return what the kernel counts of a process, None of one that is gone."""
    text = _read(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def every_process() -> dict[int, ProcessStat]:
    """Return what the kernel counts of every process that this one can see."""
    pids = [int(name) for name in _listed("/proc") if name.isdecimal()]
    return {pid: stat for pid in pids if (stat := stat_of(pid))}


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """Return the CPU time of processes and of their children that were waited for."""
    stats = [stat for pid in pids if (stat := stat_of(pid))]
    return sum(stat.seconds + stat.children_seconds for stat in stats)


def _cgroups() -> list[str]:
    """Return the directory of every cgroup of the host."""
    return list(_directories_below("/sys/fs/cgroup"))


def _directories_below(place: str) -> Iterator[str]:
    """Yield directories; that of a cgroup has a link for each child, so that leaves need no look."""
    with contextlib.suppress(OSError):  # the file is gone
        if os.stat(place).st_nlink == 2:
            return
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                yield entry.path
                yield from _directories_below(entry.path)


def cgroups_of(makers: set[int]) -> int:
    """Return how many cgroups of cells and launchers those processes have left, or have."""
    return _made_by(makers, _cgroups())


def _made_by(makers: set[int], cgroups: list[str]) -> int:
    """Return how many of `cgroups` are cells' or launchers' of those processes."""
    return sum(_maker(os.path.basename(os.path.dirname(path))) in makers for path in cgroups)


def _maker(name: str) -> int:
    """Return the pid in the name of a supervisor's directory."""
    prefix, _, rest = name.partition("-")
    number = rest.partition("-")[0]
    return int(number) if prefix == "cellwright" and number.isdecimal() else 0


def _dying_cgroups(cgroups: list[str]) -> int:
    """Count cgroups of the host that are removed and not gone; v1 counts them with the rest."""
    said = dict(line.split() for line in _read("/sys/fs/cgroup/cgroup.stat").splitlines())
    dying = int(said.get("nr_dying_descendants", 0))
    for line in _read("/proc/cgroups").splitlines()[1:]:
        controller, hierarchy, number, _ = line.split()
        top = os.path.realpath(f"/sys/fs/cgroup/{controller}")
        if hierarchy != "0" and os.path.isdir(top):
            dying += max(0, int(number) - 1 - sum(path.startswith(f"{top}/") for path in cgroups))
    return dying


def _ipc_objects() -> int:
    system_v = sum(max(0, _lines(f"/proc/sysvipc/{kind}") - 1) for kind in ("msg", "sem", "shm"))
    return system_v + len(_listed("/dev/mqueue")) + _lines("/proc/keys")


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _lines(path: str) -> int:
    return len(_read(path).splitlines())


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

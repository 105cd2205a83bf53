"""What of ours is there now: processes, cgroups, mounts, namespaces, descriptors, memory."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from ..harness.sandbox import Sandbox

_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024


class Census(NamedTuple):
    """Counts of what an execution could leave, of this process and of what it started."""

    processes: int
    cgroups: int
    mounts: int  # of this process and of the launcher
    net_namespaces: int
    descriptors: int  # of this process, keeper, nursery and launcher
    threads: int
    files: int  # of ours in /tmp and /dev/shm
    memory_mib: float  # private, of this process, keeper, nursery and launcher


def count(sandbox: Sandbox) -> Census:
    """Return what is there now; settle the sandbox first."""
    below = descendants(os.getpid())
    machinery = (os.getpid(), *launcher_of(sandbox))
    return Census(
        processes=len(below),
        cgroups=len(glob.glob(f"/sys/fs/cgroup/**/cellwright-{os.getpid()}-*/*/", recursive=True)),
        mounts=sum(_lines(f"/proc/{pid}/mountinfo") for pid in (machinery[0], machinery[-1])),
        net_namespaces=len({_namespace(pid) for pid in below}),
        descriptors=sum(len(_listed(f"/proc/{pid}/fd")) for pid in machinery),
        threads=len(_listed("/proc/self/task")),
        files=sum(
            name.startswith("cellwright")
            for place in ("/tmp", "/dev/shm")
            for name in _listed(place)
        ),
        memory_mib=sum(private_bytes(pid) or 0 for pid in machinery) / _MIB,
    )


def launcher_of(sandbox: Sandbox) -> tuple[int, int, int]:
    """Return the pids of keeper, nursery and launcher."""
    return sandbox._supervisor.generation.launcher.pids()


def guests_of(sandbox: Sandbox) -> list[int]:
    """Return the pids of the guests' main processes."""
    return children(launcher_of(sandbox)[2])


def children(pid: int) -> list[int]:
    found = []
    for file in glob.glob(f"/proc/{pid}/task/*/children"):
        found += [int(child) for child in _read(file).split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return every process below `pid`, zombies included."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def private_bytes(pid: int) -> int | None:
    """Return the memory that is this process's alone, None if the kernel does not say."""
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    private = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return sum(private) * 1024 if private else None


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """Return the CPU time of processes and of their children that were waited for (proc(5))."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


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

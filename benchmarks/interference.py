"""Interference: processor time that others took while a benchmark ran, which spoils its numbers.

Of the time in which the host's processors were busy, what this process, all below it and the kernel's
threads used is subtracted; the rest is others'.  A kernel thread's work counts as ours: it removes what
cells leave.
"""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..runner.kernel import libc
from .census import ProcessStat, children, every_process, stat_of

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OTHERS_MAY_USE = 0.05  # of all processors
MAY_BE_STOLEN = 0.02
_LAST_SECONDS = 1.0


class Reading(NamedTuple):
    """Seconds so far."""

    wall: float
    busy: float  # of all processors, ours and others
    stolen: float  # that the hypervisor gave to other machines
    ours: float


class Interference(NamedTuple):
    """The shares of all processors that others used, and that a hypervisor took."""

    others: float
    stolen: float

    @property
    def is_low(self) -> bool:
        return self.others <= OTHERS_MAY_USE and self.stolen <= MAY_BE_STOLEN

    def __str__(self) -> str:
        seen = (
            f"others used {self.others:.1%} of the processors, a hypervisor took {self.stolen:.1%}"
        )
        if self.is_low:
            return f"Quiet: {seen}."
        allowed = f"{OTHERS_MAY_USE:.0%} and {MAY_BE_STOLEN:.0%}"
        return f"NOT QUIET: {seen} (allowed: {allowed}). Read ratios, not times."


def take_reading() -> Reading:
    """Return the counters of this moment; first wait for what commands have left behind."""
    reap_orphans()
    busy, stolen = parse_processors(Path("/proc/stat").read_text())
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    ours = seconds_below(os.getpid(), every_process()) + waited.ru_utime + waited.ru_stime
    return Reading(time.monotonic(), busy, stolen, ours)


def between(before: Reading, after: Reading, processors: int) -> Interference:
    """Return what others took between two readings, as shares of what `processors` could give."""
    capacity = max((after.wall - before.wall) * processors, 1e-9)
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return Interference(max(0.0, others) / capacity, (after.stolen - before.stolen) / capacity)


def parse_processors(text: str) -> tuple[float, float]:
    """Return the busy and the stolen seconds of all processors, from `/proc/stat` (proc(5))."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS


def seconds_below(top: int, processes: dict[int, ProcessStat]) -> float:
    """Return the CPU time of `top`, of all below it with the children that those waited for, and of
    kernel threads; what `top` itself waited for is left out."""
    total = processes[top].seconds
    for pid, stat in processes.items():
        if stat.is_kernel_thread:
            total += stat.seconds
        elif pid != top and _is_below(pid, top, processes):
            total += stat.seconds + stat.children_seconds
    return total


def _is_below(pid: int, top: int, processes: dict[int, ProcessStat]) -> bool:
    while pid in processes and pid != top:
        pid = processes[pid].parent
    return pid == top


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Be the parent of processes whose parent ends, such as the one that bubblewrap does not wait for:
    else their time would count as others'."""
    libc.call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.call("prctl", _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        reap_orphans()


def wait_for_quiet(seconds: float) -> Interference:
    """Wait, for at most so long, until others leave the machine alone for a second; return what they
    took in the last one."""
    end = time.monotonic() + seconds
    while True:
        before = take_reading()
        time.sleep(1)
        found = between(before, take_reading(), os.cpu_count() or 1)
        if found.is_low or time.monotonic() > end:
            return found


def reap_orphans() -> None:
    """Wait for children that commands have left, for a second at most.

    Each command has a session of its own, so such a child is not in this process's session, and leads
    none.
    """
    end = time.monotonic() + _LAST_SECONDS
    while (left := _orphans()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _orphans() -> list[int]:
    here, ours = os.getpid(), os.getsid(0)
    return [
        pid for pid in children(here) if (stat := stat_of(pid)) and stat.session not in (ours, pid)
    ]

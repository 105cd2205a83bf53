"""Interference: processor time that others took while a benchmark ran, which spoils its numbers.

Others are all processes but this one, those below it and the kernel's threads, which remove what cells
leave.  Their time is summed: it is not what is left of the processors' busy time, because the kernel
counts the time of a guest nowhere but in its cgroup (its init ignores SIGCHLD, wait(2), NOTES).
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..runner.kernel import syscall
from .census import ProcessStat, children, every_process, stat_of

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OTHERS_MAY_USE = 0.05  # share of all processors
MAY_BE_STOLEN = 0.02
_LAST_SECONDS = 1.0


class Reading(NamedTuple):
    """Seconds so far."""

    wall: float
    stolen: float  # time that the hypervisor gave to other machines
    others: float  # processor time of other programs


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
    stolen = parse_stolen(Path("/proc/stat").read_text())
    return Reading(time.monotonic(), stolen, seconds_of_others(os.getpid(), every_process()))


def between(before: Reading, after: Reading, processors: int) -> Interference:
    """Return what others took between two readings, as shares of what `processors` could give."""
    capacity = max((after.wall - before.wall) * processors, 1e-9)
    others = max(0.0, after.others - before.others)  # less if one of them ended without a parent
    return Interference(others / capacity, (after.stolen - before.stolen) / capacity)


def parse_stolen(text: str) -> float:
    """Return the stolen seconds of all processors, from `/proc/stat` (proc(5))."""
    return int(text.split()[8]) / _TICKS


def seconds_of_others(top: int, processes: dict[int, ProcessStat]) -> float:
    """Return the CPU time of all but `top`, those below it and kernel threads, with that of the
    children that they waited for."""
    return sum(
        stat.seconds + stat.children_seconds
        for pid, stat in processes.items()
        if not stat.is_kernel_thread and not _is_below(pid, top, processes)
    )


def _is_below(pid: int, top: int, processes: dict[int, ProcessStat]) -> bool:
    while pid in processes and pid != top:
        pid = processes[pid].parent
    return pid == top


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Be the parent of processes whose parent ends, such as the one that bubblewrap does not wait for:
    else their time would count as others'."""
    syscall("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        syscall("prctl", _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
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

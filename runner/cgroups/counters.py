"""`CountedCgroup`: a cgroup whose kernel counts, by the files that `Counters` keeps open."""

import contextlib
import os
from collections.abc import Mapping

from .cgroup_tree import Caps, Cgroup, CgroupUsage, open_all, read_number, remove, write


class Counters:
    """Counter files of one cgroup, opened when it is made and read when a call ends: opening a file
    costs twenty times as much as reading it (measured)."""

    def __init__(self, files: dict[str, str], *, resettable: str = "") -> None:
        """`resettable` is the name of the file that `reset` is for.

        Raises OSError if an existing file cannot be opened: a cap would not be counted.
        """
        self._descriptors: dict[str, int] = {}
        self._resettable = -1
        try:
            self._open(files, resettable)
            if path := files.get(resettable):
                self._open_resettable(resettable, path)
        except BaseException:
            self.close()
            raise

    def _open(self, files: dict[str, str], but: str = "") -> None:
        for name, path in files.items():
            if name != but:  # an older kernel lacks some
                with contextlib.suppress(FileNotFoundError):
                    self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _open_resettable(self, name: str, path: str) -> None:
        try:
            self._resettable = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._descriptors[name] = self._resettable
        except OSError:  # the kernel lets nobody write (memory.peak before Linux 6.12)
            self._open({name: path})

    @property
    def is_resettable(self) -> bool:
        """Whether `reset` can be expected to succeed."""
        return self._resettable >= 0

    def reset(self) -> bool:
        """Have a peak begin again at the current use, as this descriptor reads it; False if the kernel
        cannot do that."""
        try:
            return self.is_resettable and os.pwrite(self._resettable, b"0", 0) == 1
        except OSError:
            return False

    def number(self, name: str) -> int | None:
        """Return the number in a file, None if there is no such file."""
        try:
            return int(os.pread(self._descriptors[name], 64, 0))
        except (KeyError, ValueError, OSError):  # OSError: the cgroup has been removed
            return None

    def fields(self, name: str) -> dict[str, int]:
        """Return the fields of a flat keyed file, such as cpu.stat."""
        pairs = (line.split() for line in self._read(name).splitlines())
        return {key.decode(): int(value) for key, value in pairs}

    def _read(self, name: str) -> bytes:
        if name not in self._descriptors:
            return b""
        try:
            return os.pread(self._descriptors[name], 4096, 0)
        except OSError:  # the cgroup was removed meanwhile
            return b""

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._resettable = -1


# What the kernel still charges when every process has ended: pages that each processor keeps for the
# next charge (64 each), and what it frees a moment later. 20 to 570 KiB after most programs, 3 MiB
# after one that made 3,000 files (measured, Linux 6.18, two processors).
_MOST_CHARGED_BYTES = 1 << 20
_MOST_CHARGED_PART = 64  # and at most this part of the cap


class CountedCgroup(Cgroup):
    """A cgroup of either version: `_prepare` sets its caps and returns the files to open for the
    launcher; `_times` and `_events` read what the kernel counts."""

    _parts = 1  # parts in a second: `_times` counts in them
    _again: Mapping[str, tuple[str, str]] = {}  # counters for `renew` by name: controller and file

    def __init__(
        self, caps: Caps, directories: tuple[str, ...], counters: dict[str, str], memory: str,
        thawing: tuple[str, str],
    ) -> None:  # fmt: skip
        """Make the directories; `memory` is the file with its current use, `thawing` the file and the
        text by which it goes on."""
        super().__init__()
        self._caps, self._made = caps, directories
        self._memory, self._thawing = memory, thawing
        self._is_frozen = False
        self._cells = 1  # cells that have had it, the present one included
        self._is_left = self._is_retired = False
        self._times_before = (0, 0)  # `_times` when the present cell got it
        self._memory_before = 0
        try:
            for directory in directories:
                os.mkdir(directory)
            self._joins = self._prepare(caps)
            self.descriptors = open_all(*self._joins)
            self._counters = Counters(counters, resettable="memory_peak")
        except BaseException:  # no memory, Ctrl-C: no caller would remove it
            self.close_descriptors()
            remove(directories)
            raise

    def _prepare(self, caps: Caps) -> tuple[list[str], int]:
        raise NotImplementedError

    def _times(self) -> tuple[int, int] | None:
        """Return the CPU time since it was made and the part of it in user mode, in parts of a second
        (`_parts`); None if nothing counts it."""
        raise NotImplementedError

    def _events(self, *, kills: bool) -> int:
        raise NotImplementedError

    def _write_cpu_cap(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        self._is_left = True

    def retire(self) -> None:
        self._is_retired = True

    def take_back(self, cells_each: int) -> bool:
        """The kernel resets no peak of processes, so that the next cell's is known only if this one's
        was 1. A peak of memory far below the cap proves that no page was refused."""
        was_left, self._is_left = self._is_left, False
        if not was_left or self._is_retired or self._cells >= cells_each:
            return False
        memory, processes = self.memory_peak_bytes(), self._counters.number("processes_peak")
        if memory is None or memory >= self._caps.memory_bytes // 2 or processes != 1:
            return False
        return self._counters.is_resettable

    def renew(self) -> bool:
        try:
            if not self._is_empty() or not self._counters.reset():
                return False
            if (before := self._times()) is None:
                return False
            # The rest of the earlier cell's period would hold the next one back by up to 100 ms.
            # Writing the same cap begins a new period (measured; tg_set_cfs_bandwidth).
            self._write_cpu_cap()
            self.descriptors = open_all(*self._joins)
        except OSError:  # no memory, no descriptors
            return False
        self._times_before = before
        self.cpu_seconds_before = before[0] / self._parts
        self._cells += 1
        return True

    def _is_empty(self) -> bool:
        """Tell whether no process is in it, none was killed for memory or refused a child, and little
        memory is still charged."""
        files = {name: f"{self.places[of]}/{file}" for name, (of, file) in self._again.items()}
        counters = Counters(files)
        try:
            # A process counts until it was reaped, though it has left `cgroup.procs` (pids_release).
            if counters.number("processes") != 0 or self._counters.number("sockets"):
                return False
            kills, refusals = counters.fields("kills"), counters.fields("refusals")
            if kills.get("oom_kill") != 0 or refusals.get("max") != 0:
                return False
            charged = counters.number("memory")
        finally:
            counters.close()
        self._memory_before = charged or 0
        most = min(_MOST_CHARGED_BYTES, self._caps.memory_bytes // _MOST_CHARGED_PART)
        return charged is not None and charged <= most

    def cpu_seconds(self) -> float | None:
        times = self._times()
        return None if times is None else (times[0] - self._times_before[0]) / self._parts

    def _user_and_system(self) -> tuple[float | None, float | None]:
        if (times := self._times()) is None:
            return None, None
        before = self._times_before
        used, user = times[0] - before[0], times[1] - before[1]
        user = min(max(user, 0), used)
        return user / self._parts, (used - user) / self._parts

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        counters, caps = self._counters, self._caps
        memory, processes = counters.number("memory_peak"), counters.number("processes_peak")
        killed = refused = 0
        # A peak far below a cap proves that there were no events at it: this saves opening a file in
        # nearly every call.
        if not ended_well or memory is None or memory >= caps.memory_bytes // 2:
            killed = self._events(kills=True)
        if processes is None or processes >= caps.processes // 2:
            refused = self._events(kills=False)
        return CgroupUsage(*self._user_and_system(), memory, processes, killed, refused)

    def memory_peak_bytes(self) -> int | None:
        return self._counters.number("memory_peak")

    def memory_bytes(self) -> int | None:
        now = read_number(self._memory) if self._memory else None
        return None if now is None else max(0, now - self._memory_before)

    def thaw(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            with contextlib.suppress(OSError):  # the cell has ended
                write(*self._thawing)

    def remove(self) -> bool:
        self._counters.close()
        self.close_descriptors()
        return remove(self._made)

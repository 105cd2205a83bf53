"""`GpuMeter`: memory and time of GPUs that cells use, as the driver's library NVML tells them from
outside.  The only module that imports pynvml (extra `gpu`).

No cgroup counts memory of a GPU, and no descriptor tells when the driver has freed it: so a thread asks
the driver some times a second, while there are cells with a GPU.  A driver that hangs stops that thread
alone; callers wait for it with a deadline.
"""

import contextlib
import os
import threading
import time
from typing import Any, NamedTuple

_ASK_SECONDS = 0.1
_LOOK_SECONDS = 2.0  # for an answer of the driver
_FREE_SECONDS = 10.0  # for memory to be free after the last process has ended (measured: below 1)
_MOST_SAMPLE_SECONDS = 1.0  # one sample of the driver stands for at most so much time
_MICRO = 1_000_000


class GpuUse(NamedTuple):
    """The use of GPUs by a cell; None where nothing tells it. `left_bytes`: memory that the driver
    still held when the wait for its release was over."""

    memory_peak_bytes: int | None = None
    seconds: float | None = None
    left_bytes: int = 0

    def since(self, before: "GpuUse") -> "GpuUse":
        """Return this with the seconds after `before`; the peak is of the whole time."""
        if self.seconds is None:
            return self
        return self._replace(seconds=max(0.0, self.seconds - (before.seconds or 0.0)))


NO_USE = GpuUse()


class GpuCount:
    """The count of one cell; `close` ends it."""

    def __init__(self, meter: "GpuMeter", namespace: int) -> None:
        self._meter = meter
        self.namespace = namespace  # inode of the cell's pid namespace
        self.peak = self.now = 0
        self.seconds = 0.0

    def use(self) -> GpuUse:
        """Return what the driver said last."""
        return GpuUse(self.peak, self.seconds, self.now) if self._meter.is_open else NO_USE

    def look(self) -> GpuUse:
        """Return what the driver says now, or what it said last if it does not answer in time."""
        self._meter.ask(_LOOK_SECONDS)
        return self.use()

    def settle(self) -> GpuUse:
        """Wait until the driver has freed all memory of the cell, whose processes have ended."""
        self._meter.wait_for(lambda: self.now == 0, _FREE_SECONDS)
        return self.use()

    def close(self) -> None:
        self._meter.end(self)


class GpuMeter:
    """Asks the driver for all cells of this process.  Safe from many threads."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module pynvml."""
        self._nvml = nvml
        self._cards: list[Any] = []
        self._seen: dict[int, int] = {}  # number of a GPU -> time of its last sample, in µs
        self.has_failed = False
        self.is_open = False  # False too where NVML is missing, or has not answered yet
        self._changed = threading.Condition()
        self._counts: set[GpuCount] = set()
        self._namespaces: dict[int, int] = {}  # pid of a listed process -> its pid namespace
        self._answers = self._asked = 0
        self._thread: threading.Thread | None = None

    def begin(self, process: int) -> GpuCount:
        """Return the count of the cell that `process` is in."""
        count = GpuCount(self, _namespace_of(process))
        with self._changed:
            self._counts.add(count)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cellwright-gpu", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return count

    def end(self, count: GpuCount) -> None:
        with self._changed:
            self._counts.discard(count)

    def ask(self, seconds: float) -> None:
        """Wait until the driver was asked once more, at most `seconds`."""
        with self._changed:
            self._asked = self._answers + 2  # the one under way may be over before
            self._changed.notify_all()
            wanted = self._asked
            self._changed.wait_for(lambda: self._answers >= wanted or self.has_failed, seconds)

    def wait_for(self, is_so: Any, seconds: float) -> None:
        self.ask(min(seconds, _LOOK_SECONDS))
        with self._changed:
            self._changed.wait_for(is_so, seconds)

    def _open(self) -> bool:
        """Return whether NVML works; it may take as long as it likes here."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            numbers = range(nvml.nvmlDeviceGetCount())
            self._cards = [nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
        except (nvml.NVMLError, OSError):
            return False
        self._seen = dict.fromkeys(numbers, int(time.time() * _MICRO))
        return True

    def _run(self) -> None:
        is_open = self._open()
        with self._changed:
            self.is_open, self.has_failed = is_open, not is_open
            self._changed.notify_all()
        while is_open:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._counts))
                if self._answers >= self._asked:
                    self._changed.wait(_ASK_SECONDS)
            memory, seconds = self._ask_driver()
            with self._changed:
                for count in self._counts:
                    count.now = memory.get(count.namespace, 0)
                    count.peak = max(count.peak, count.now)
                    count.seconds += seconds.get(count.namespace, 0.0)
                self._answers += 1
                self._changed.notify_all()

    def _ask_driver(self) -> tuple[dict[int, int], dict[int, float]]:
        """Return bytes held, and seconds used since the last time, by pid namespace."""
        memory: dict[int, int] = {}
        seconds: dict[int, float] = {}
        listed: set[int] = set()
        for number, card in enumerate(self._cards):
            with contextlib.suppress(self._nvml.NVMLError):  # none listed, or a GPU that was lost
                for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(card):
                    listed.add(each.pid)
                    where = self._namespace(each.pid)
                    memory[where] = memory.get(where, 0) + (each.usedGpuMemory or 0)
            with contextlib.suppress(self._nvml.NVMLError):  # no sample since
                seen, last = self._seen[number], dict[int, int]()
                found = self._nvml.nvmlDeviceGetProcessUtilization(card, seen)
                for each in sorted(found, key=lambda sample: sample.timeStamp):
                    span = (each.timeStamp - last.get(each.pid, seen)) / _MICRO
                    where, used = self._namespace(each.pid), each.smUtil / 100
                    span = min(max(0.0, span), _MOST_SAMPLE_SECONDS)
                    seconds[where] = seconds.get(where, 0.0) + span * used
                    last[each.pid] = each.timeStamp
                self._seen[number] = max(seen, *last.values(), 0)
        self._namespaces = {pid: at for pid, at in self._namespaces.items() if pid in listed}
        return memory, seconds

    def _namespace(self, pid: int) -> int:
        """Return the pid namespace of a process, also of one that has ended and is still listed."""
        with contextlib.suppress(OSError):
            self._namespaces[pid] = _namespace_of(pid)
        return self._namespaces.get(pid, 0)


def _namespace_of(process: int) -> int:
    return os.stat(f"/proc/{process}/ns/pid").st_ino


_lock = threading.Lock()
_meters: dict[int, GpuMeter | None] = {}  # pid -> the meter of that process: a fork has no thread


def begin_count(process: int) -> GpuCount | None:
    """Return the count of the cell that `process` is in; None where NVML, or pynvml, is missing."""
    with _lock:
        own = os.getpid()
        if own not in _meters:
            _meters[own] = _meter()
        meter = _meters[own]
    return meter.begin(process) if meter else None


def _meter() -> GpuMeter | None:
    try:
        import pynvml
    except ImportError:
        return None
    return GpuMeter(pynvml)


def what_hangs(cgroup: str) -> str:
    """Describe the processes in the directory of a cgroup that do not end, such as those that wait in
    a driver; empty if there is none."""
    found = []
    with contextlib.suppress(OSError):
        with open(f"{cgroup}/cgroup.procs") as file:
            pids = file.read().split()
        for pid in pids[:_MOST_NAMED]:
            with contextlib.suppress(OSError):
                found.append(_described(pid))
    return ", ".join(found)


_MOST_NAMED = 8


def _described(pid: str) -> str:
    with open(f"/proc/{pid}/status", errors="replace") as file:
        lines = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    name = ascii(lines["Name"])
    where = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:  # for root alone
        where = file.read().strip("0 \n")
    return f"{name} ({pid}, {lines['State']}{f' in {where}' if where else ''})"

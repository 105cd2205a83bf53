"""`Cgroup` and `CgroupTree`: the interface of control groups, for both versions."""

import contextlib
import itertools
import os
import select
import time
import warnings
from collections.abc import Iterable
from typing import NamedTuple, Protocol

CONTROLLERS = ("memory", "cpu", "pids")
FREEZER_STATE = "freezer.state"  # cgroup v1 (cgroup-v1/freezer-subsystem.rst)


class Caps(NamedTuple):
    memory_bytes: int
    cpus: float
    processes: int
    socket_bytes: int = 0  # on v1, beyond memory_bytes, of TCP and UDP; 0 where a cell has neither


class CgroupUsage(NamedTuple):
    """A cell's usage as its cgroup counted it; None where nothing counts."""

    cpu_user_seconds: float | None = None
    cpu_system_seconds: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    killed_for_memory: int = 0  # processes that the kernel killed at the cap
    forks_refused: int = 0  # at the cap of processes and threads


class Cgroup(Protocol):
    """The cgroup of one cell."""

    places: dict[str, str]  # controller -> its directory, or "v2"
    descriptors: tuple[int, ...]
    into_cgroup: bool  # the last descriptor is a v2 directory to be born in

    def close_descriptors(self) -> None:
        """Close the descriptors that were sent to the launcher."""

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far, None if nothing counts it."""

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        """Return what the cell used; kills at the cap of a cgroup above are counted unless the cell
        `ended_well`."""

    def memory_peak_bytes(self) -> int | None:
        """Return the most memory it has held, None if nothing counts it."""

    def memory_bytes(self) -> int | None:
        """Return the memory that it holds now, None if nothing counts it."""

    @property
    def can_exceed(self) -> bool:
        """Return whether the kernel may grant more than the caps, so that the supervisor has to
        check."""

    def has_exceeded(self) -> bool:
        """Return whether the cell exceeds its caps by far and has to be killed."""

    def freeze(self) -> bool:
        """Stop every process in it until `thaw`; False if that cannot be done: then all go on."""

    def thaw(self) -> None:
        """Let its processes go on, if they were stopped."""

    def kill(self) -> None:
        """Kill every process in it, and processes forked meanwhile; frozen ones too."""

    def remove(self) -> bool:
        """Remove it; False while something still runs in it."""


class CgroupTree(Protocol):
    """Makes cgroups for the cells of one supervisor."""

    missing: dict[str, str]  # controller -> why the host lacks it; "" if it has it
    places: dict[str, str]  # controller -> the directory of this supervisor, or "v2"
    no_freezer: str  # why cells cannot be frozen; "" if they can

    @property
    def joined_by_write(self) -> int:
        """How many `tasks` files a cell has to write to (v1)."""

    def create(self, name: str, caps: Caps) -> Cgroup: ...

    def admit(self, keeper: int, uid: int) -> None:
        """Let the processes that `keeper` will fork, with the id `uid`, put cells into cgroups of this
        tree."""

    def close(self) -> None:
        """Remove what is left of the tree."""


class CgroupUse(NamedTuple):
    """What a cgroup uses now; None where nothing counts."""

    memory_bytes: int | None
    cpu_seconds: float | None
    is_frozen: bool


class NoCgroup:
    """The cgroup of a cell without one."""

    places: dict[str, str] = {}  # noqa: RUF012 - stays empty
    descriptors: tuple[int, ...] = ()
    into_cgroup = False
    can_exceed = False

    def close_descriptors(self) -> None:
        return

    def cpu_seconds(self) -> float | None:
        return None

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        return CgroupUsage()

    def memory_peak_bytes(self) -> int | None:
        return None

    def memory_bytes(self) -> int | None:
        return None

    def has_exceeded(self) -> bool:
        return False

    def freeze(self) -> bool:
        return False

    def thaw(self) -> None:
        return

    def kill(self) -> None:
        return

    def remove(self) -> bool:
        return True


class NoCgroups:
    """The tree of a host without usable control groups."""

    joined_by_write = 0

    def __init__(self, reason: str) -> None:
        self.missing = dict.fromkeys(CONTROLLERS, reason)
        self.no_freezer = reason
        self.places: dict[str, str] = {}

    def create(self, name: str, caps: Caps) -> Cgroup:
        return NoCgroup()

    def admit(self, keeper: int, uid: int) -> None:
        return

    def close(self) -> None:
        return


def read(path: str) -> str:
    """Return the text of a file of the kernel."""
    with open(path) as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Write one cgroup file with one write(2), as the kernel requires; OSError names the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def open_all(paths: Iterable[str], flags: int) -> tuple[int, ...]:
    """Open all files or none."""
    opened: list[int] = []
    try:
        for path in paths:
            opened.append(os.open(path, flags | os.O_CLOEXEC))  # noqa: PERF401 - to be closed
    except BaseException:  # no memory, Ctrl-C
        for descriptor in opened:
            os.close(descriptor)
        raise
    return tuple(opened)


class Counters:
    """Counter files of one cgroup, opened when it is made and read when a call ends: opening a file
    costs twenty times as much as reading it (measured)."""

    def __init__(self, files: dict[str, str]) -> None:
        """Raises OSError if an existing file cannot be opened: a cap would not be counted."""
        self._descriptors: dict[str, int] = {}
        try:
            for name, path in files.items():
                try:
                    self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:  # an older kernel does not have it
                    continue
        except BaseException:
            self.close()
            raise

    def number(self, name: str) -> int | None:
        """Return the number in a file, None if there is no such file."""
        try:
            return int(os.pread(self._descriptors[name], 64, 0))
        except (KeyError, ValueError, OSError):  # the last: the cgroup was removed meanwhile
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


def may_have_events(peak: int | None, cap: int) -> bool:
    """Tell whether there may be events at a cap.

    A peak far below it proves that there were none: this saves opening a file in nearly every call.
    """
    return peak is None or peak >= cap // 2


def read_number(path: str) -> int | None:
    """Return the number in a file, None if it is not there."""
    try:
        return int(read(path))
    except (OSError, ValueError):
        return None


def read_field(path: str, field: str) -> int | None:
    """Return the number after `field` in a flat keyed file such as memory.events."""
    with contextlib.suppress(OSError, ValueError):
        for line in read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    return None


def start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks: with its pid, an identity (proc(5))."""
    with contextlib.suppress(OSError):
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    return ""


def usage_at(places: dict[str, str]) -> CgroupUse:
    """Return what the cgroup in these directories uses."""
    if place := places.get("v2"):
        cpu = read_field(f"{place}/cpu.stat", "usage_usec")
        seconds = None if cpu is None else cpu / 1e6
        frozen = _text(f"{place}/cgroup.freeze") == "1"
        return CgroupUse(_number(f"{place}/memory.current"), seconds, frozen)
    memory, account = places.get("memory", ""), places.get("cpuacct", "")
    nanoseconds = _number(f"{account}/cpuacct.usage")
    return CgroupUse(
        _number(f"{memory}/memory.usage_in_bytes"),
        None if nanoseconds is None else nanoseconds / 1e9,
        _text(f"{places.get('freezer', '')}/{FREEZER_STATE}") in ("FROZEN", "FREEZING"),
    )


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return read(path).strip()
    return ""


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def thaw(places: dict[str, str]) -> None:
    """Let what is frozen on v1 in these directories, and those of cells below, go on."""
    if freezer := places.get("freezer"):
        for directory in (freezer, *_below(freezer)):
            with contextlib.suppress(OSError):
                write(f"{directory}/{FREEZER_STATE}", "THAWED")


def processes_in(directory: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(line) for line in read(f"{directory}/cgroup.procs").split()]
    return []


def remove(directories: Iterable[str]) -> bool:
    """Remove empty cgroups; return False if one is still busy."""
    gone = True
    for directory in directories:
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def remove_with_cells(directory: str) -> bool:
    """Remove the cgroup of a supervisor and its cells' cgroups; return False if one is still busy.

    Other processes may do the same at the same time.
    """
    for cell in _below(directory):  # on v1 a killed process dies only once it is thawed
        with contextlib.suppress(OSError):
            write(f"{cell}/{FREEZER_STATE}", "THAWED")
    return remove([*_below(directory), directory])


_END_SECONDS = 5.0  # for killed processes to leave their cgroup
_BUSY: set[str] = set()  # given up, and not removed yet


def give_up(directory: str) -> None:
    """Remove the cgroup of a supervisor that is done.  The next sweep of this process removes what
    is still busy, or another process does after its end."""
    gone = remove_with_cells(directory)
    if not gone:  # a launcher that was killed while it began may be dying still
        _wait_for(itertools.chain.from_iterable(map(processes_in, _below(directory))))
        gone = remove_with_cells(directory)
    if gone:
        _BUSY.discard(directory)
    elif directory not in _BUSY:
        _BUSY.add(directory)
        words = f"{directory}: a process in it does not end; it is removed later"
        warnings.warn(words, ResourceWarning, stacklevel=2)


def _wait_for(pids: Iterable[int]) -> None:
    """Wait until processes have ended, for _END_SECONDS at most in all."""
    deadline = time.monotonic() + _END_SECONDS
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(pidfd)


def remove_given_up() -> None:
    """Remove cgroups that were busy when their supervisors were done."""
    for directory in tuple(_BUSY):
        if remove_with_cells(directory):
            _BUSY.discard(directory)


def _below(directory: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []

"""`Cgroup` and `CgroupTree`: the interface of control groups, for both versions."""

import contextlib
import errno
import fcntl
import itertools
import os
import select
import time
import warnings
from collections.abc import Iterable
from typing import NamedTuple

CONTROLLERS = ("memory", "cpu", "pids")
FREEZER_STATE = "freezer.state"  # cgroup v1 (cgroup-v1/freezer-subsystem.rst)


class Caps(NamedTuple):
    memory_bytes: int
    cpus: float
    processes: int
    socket_bytes: int = 0  # cgroup v1: TCP and UDP memory beyond memory_bytes; 0 without either


class CgroupUsage(NamedTuple):
    """A cell's usage as its cgroup counted it; None where nothing counts."""

    cpu_user_seconds: float | None = None
    cpu_system_seconds: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    killed_for_memory: int = 0  # processes that the kernel killed at the cap
    forks_refused: int = 0  # at the cap of processes and threads


class Cgroup:
    """The cgroup of one cell.  This one stands for none: it caps nothing, and counts nothing."""

    into_cgroup = False  # the last descriptor is the cgroup v2 directory to start in
    # whether the kernel may grant more than the caps: the supervisor has to check
    can_exceed = False
    cpu_seconds_before = 0.0  # CPU time of the cells that had it before

    def __init__(self) -> None:
        self.places: dict[str, str] = {}  # controller -> its directory, or "v2"
        self.descriptors: tuple[int, ...] = ()

    def close_descriptors(self) -> None:
        """Close the descriptors that were sent to the launcher."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def leave(self) -> None:
        """Note that its cell was ready, and that every process of the cell has ended by itself or with
        init: another cell may have it, unless it was retired."""

    def retire(self) -> None:
        """Let no other cell have it."""

    def take_back(self, cells_each: int) -> bool:
        """Take it from its cell; tell whether another may have it, if at most `cells_each` have it."""
        return False

    def renew(self) -> bool:
        """Make it as new for another cell; False if that cannot be done: then it is to be removed."""
        return False

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far, None if nothing counts it."""
        return None

    def usage(self, *, ended_well: bool = True) -> CgroupUsage:
        """Return what the cell used; kills at the cap of a cgroup above are counted unless the cell
        `ended_well`."""
        return CgroupUsage()

    def memory_peak_bytes(self) -> int | None:
        """Return the most memory it has held, None if nothing counts it."""
        return None

    def memory_bytes(self) -> int | None:
        """Return the memory that it holds now, None if nothing counts it."""
        return None

    def has_exceeded(self) -> bool:
        """Return whether the cell exceeds its caps by far and has to be killed."""
        return False

    def freeze(self) -> bool:
        """Stop every process in it until `thaw`; False if that cannot be done: then all go on."""
        return False

    def thaw(self) -> None:
        """Let its processes go on, if they were stopped."""

    def kill(self) -> None:
        """Kill every process in it, and processes forked meanwhile; frozen ones too."""

    def remove(self) -> bool:
        """Remove it; False while something still runs in it."""
        return True


class CgroupTree:
    """Makes cgroups for the cells of one supervisor.  This one is for a host without usable ones."""

    joined_by_write = 0  # how many `tasks` files a cell has to write to (v1)

    def __init__(self, reason: str) -> None:
        self.missing = dict.fromkeys(
            CONTROLLERS, reason
        )  # why the host lacks each; "" if it has it
        self.no_freezer = reason  # why cells cannot be frozen; "" if they can
        self.places: dict[str, str] = {}  # controller -> the supervisor's directory, or "v2"

    def create(self, name: str, caps: Caps) -> Cgroup:
        """Return a new cgroup."""
        return Cgroup()

    def admit(self, keeper: int, uid: int) -> None:
        """Let the processes that `keeper` will fork, with the id `uid`, put cells into cgroups of this
        tree."""

    def close(self) -> None:
        """Remove what is left of the tree."""


class CgroupUse(NamedTuple):
    """The current use of a cgroup; None if nothing counts it."""

    memory_bytes: int | None
    cpu_seconds: float | None
    is_frozen: bool


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


def open_joins(directories: Iterable[str]) -> tuple[int, ...]:
    """Open the files by which a process joins cgroups, as a write of 0 to each; those of directories
    that are not there yet are left out."""
    names = ("tasks", "cgroup.procs")  # v1 and v2 have the second, v1 alone the first
    found = []
    for each in dict.fromkeys(directories):
        paths = (f"{each}/{name}" for name in names)
        path = next((path for path in paths if os.path.exists(path)), None)
        found += [path] if path else []
    return open_all(found, os.O_WRONLY)


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


def this_process() -> str:
    """Return the beginning of names of what this process makes: `PID-TICKS-NAMESPACE`."""
    pid = os.getpid()
    return f"{pid}-{start_time(pid)}-{pid_namespace()}"


def has_ended(name: str) -> bool:
    """Tell whether the process that made something has ended; `name` begins with its `this_process`.

    False for one of another pid namespace, such as a container's: its number says nothing here.  A
    namespace that ended lends its own number to a later one.
    """
    pid, start, *more = name.split("-")
    if not pid.isdecimal() or (len(more) > 1 and more[0] not in ("", pid_namespace())):
        return False
    return start_time(int(pid)) != start


_FIRST_NAMESPACE = 0xEFFFFFF8  # below the inodes of namespaces (linux/proc_ns.h)


def pid_namespace() -> str:
    """Return the number of the pid namespace, from the first on: short, since names of sockets are."""
    return f"{(os.stat('/proc/self/ns/pid').st_ino - _FIRST_NAMESPACE) % 2**32}"


_TRIES = 10


def make_held(directory: str) -> int:
    """Make the cgroup of a supervisor, and return a descriptor that locks it for as long as the
    supervisor lives: flock(2) counts in all pid namespaces.  Raises OSError."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)  # no other user may lock it
        with contextlib.suppress(FileNotFoundError):
            descriptor = lock_of(directory)
            # a sweep may have removed it before it was locked
            if descriptor is not None and os.path.isdir(directory):
                return descriptor
            if descriptor is not None:
                os.close(descriptor)
    raise BlockingIOError(errno.EAGAIN, "another process holds a new cgroup", directory)


def make_all_held(directories: Iterable[str]) -> list[int]:
    """Make all of them or none, as `make_held` does each; raises OSError."""
    held: list[int] = []
    try:
        for directory in directories:
            held.append(make_held(directory))  # noqa: PERF401 - to be closed
    except BaseException:  # no descriptor, Ctrl-C
        remove(directories)
        let_go(held)
        raise
    return held


def let_go(held: list[int]) -> None:
    """Close the descriptors of `make_held`; another thread may do the same at the same time."""
    with contextlib.suppress(IndexError):
        while True:
            os.close(held.pop())


def lock_of(directory: str) -> int | None:
    """Return a descriptor that locks the directory; None if another process has it locked."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


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
    """Thaw these directories of cgroup v1 and those of cells below them."""
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


_END_SECONDS = 5.0  # how long killed processes may take to leave their cgroup
_BUSY: set[str] = set()  # cgroups that could not be removed yet


def give_up(directory: str) -> None:
    """Remove the cgroup of a supervisor that is done.  The next sweep of this process removes what
    is still busy, or another process does after its end."""
    gone = remove_with_cells(directory)
    if not gone:  # a launcher that was killed at its start may still be dying
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

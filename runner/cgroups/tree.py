"""What the rest of the runner sees of control groups, whatever their version."""

import contextlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

CONTROLLERS = ("memory", "cpu", "pids")


class Caps(NamedTuple):
    memory_bytes: int
    cpus: float
    processes: int
    socket_bytes: int = 0  # on v1, beyond memory_bytes, of TCP and UDP; 0 where a cell has neither


class Usage(NamedTuple):
    """What a cell used, as its cgroup counted it; None where nothing counted."""

    cpu_user_seconds: float | None = None
    cpu_system_seconds: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None


class Cgroup(Protocol):
    """The cgroup of one cell."""

    descriptors: tuple[int, ...]
    into_cgroup: bool  # the last descriptor is a v2 directory to be born in

    def close_descriptors(self) -> None:
        """Close what was sent to the launcher."""

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far, None if nobody counts."""

    def usage(self) -> Usage: ...

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out here."""

    @property
    def can_exceed(self) -> bool:
        """Tell whether the kernel may give it more than its caps, so that somebody has to look."""

    def has_exceeded(self) -> bool:
        """Tell whether it has by far more than its caps, and is to be killed."""

    def kill(self) -> None:
        """Kill every process in it, and those that they fork meanwhile."""

    def remove(self) -> bool:
        """Remove it; False while something still runs in it."""


class CgroupTree(Protocol):
    """Makes cgroups for the cells of one supervisor."""

    missing: dict[str, str]  # controller -> why the host does not give it; "" where it does

    def create(self, name: str, caps: Caps) -> Cgroup: ...

    def admit(self, pids: tuple[int, ...], uid: int) -> None:
        """Let those who make cells, `pids` that run as `uid`, put them into cgroups of this tree."""

    def close(self) -> None:
        """Remove what is left of the tree."""


class NoCgroup:
    """The cgroup of a cell that has none."""

    descriptors: tuple[int, ...] = ()
    into_cgroup = False
    can_exceed = False

    def close_descriptors(self) -> None:
        return

    def cpu_seconds(self) -> float | None:
        return None

    def usage(self) -> Usage:
        return Usage()

    def oom_kills(self) -> int:
        return 0

    def has_exceeded(self) -> bool:
        return False

    def kill(self) -> None:
        return

    def remove(self) -> bool:
        return True


class NoCgroups:
    """The tree of a host that has none, or gives none to this user."""

    def __init__(self, reason: str) -> None:
        self.missing = dict.fromkeys(CONTROLLERS, reason)

    def create(self, name: str, caps: Caps) -> Cgroup:
        return NoCgroup()

    def admit(self, pids: tuple[int, ...], uid: int) -> None:
        return

    def close(self) -> None:
        return


def write(path: Path | str, text: str) -> None:
    """Write one cgroup file with one write(2), as the kernel wants it; OSError names the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def open_all(paths: Iterable[Path], flags: int) -> tuple[int, ...]:
    """Open every file or none."""
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
    """Files of one cgroup that are read when a call ends, opened when it is made: opening one costs
    twenty times as much as reading it (measured)."""

    def __init__(self, files: dict[str, Path]) -> None:
        """Raises OSError if one that is there cannot be opened: a cap would go uncounted."""
        self._descriptors: dict[str, int] = {}
        try:
            for name, path in files.items():
                with contextlib.suppress(FileNotFoundError):  # an older kernel does not have it
                    self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def number(self, name: str) -> int | None:
        """Return what a file that holds one number says, None if it is not there."""
        try:
            return int(self._read(name))
        except ValueError:
            return None

    def fields(self, name: str) -> dict[str, int]:
        """Return what a flat keyed file says, such as cpu.stat."""
        pairs = (line.split() for line in self._read(name).splitlines())
        return {key.decode(): int(value) for key, value in pairs}

    def _read(self, name: str) -> bytes:
        if name not in self._descriptors:
            return b""
        try:
            return os.pread(self._descriptors[name], 4096, 0)
        except OSError:  # the cgroup was removed under us
            return b""

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_field(path: Path, field: str) -> int | None:
    """Return the number after `field` in a flat keyed file such as memory.events."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    return None


def processes_in(directory: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    return []


def remove(directories: Iterable[Path]) -> bool:
    """Remove cgroups that are empty; False if one is still busy."""
    gone = True
    for directory in directories:
        try:
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def remove_with_cells(directory: Path) -> bool:
    """Remove the cgroup of a supervisor and what is left below it; False if one is still busy.

    Others may do the same meanwhile.
    """
    return remove([*_below(directory), directory])


_BUSY: set[Path] = set()  # given up, and not removed yet


def give_up(directory: Path) -> None:
    """Remove the cgroup of a supervisor that is done.  What is busy still, the next sweep of this
    process removes, or that of another one after its end."""
    if remove_with_cells(directory):
        _BUSY.discard(directory)
    elif directory not in _BUSY:
        _BUSY.add(directory)
        words = f"{directory}: a process in it does not end; it is removed later"
        warnings.warn(words, ResourceWarning, stacklevel=2)


def remove_given_up() -> None:
    """Remove what was busy when its supervisor was done, and is no more."""
    for directory in tuple(_BUSY):
        if remove_with_cells(directory):
            _BUSY.discard(directory)


def remove_cells(directory: Path) -> bool:
    """Remove what is left below the cgroup of a supervisor; False if one is still busy."""
    return remove(_below(directory))


def _below(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []

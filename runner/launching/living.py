"""Records of living launchers and sessions of this user's processes: a small file for each.

A record names processes by number, start time and pid namespace, which together no other process has. A
record is removed when its launcher or session ends; `remove_leftovers` removes those of killed
processes.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

from ..cgroups.cgroup_tree import (
    has_ended,
    pid_namespace,
    read,
    remove_with_cells,
    start_time,
    thaw,
    this_process,
    usage_at,
)
from ..cgroups.detect import sweep_host
from ..channel import has_news

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 64 * 1024
_END_SECONDS = 5.0
_ROOTS_RUNTIME = "/run"
_PREFIX = "cellwright"  # prefix of directories of exposed ports
# Files of a lock of packages, and of the authority of a sandbox.
_OWN_FILES = (
    "wanted.txt", "report.json", "pylock.toml", "authorities.pem", "authorities.jks",
)  # fmt: skip
_NAMES = {
    "sandbox": "cell-keeper",
    "session": "cell-init",
}  # names of the processes that are killed
_counter = itertools.count()
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process: its number, its start time in clock ticks, and the pid namespace of both."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    start: _Text
    namespace: _Text = ""

    def is_alive(self) -> bool:
        return self.namespace in ("", pid_namespace()) and start_time(self.pid) == self.start

    def has_ended(self) -> bool:
        return has_ended(f"{self.pid}-{self.start}-{self.namespace}-")


class LivingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher with its cells, or a session."""

    kind: Literal["sandbox", "session"]
    supervisor: ProcessIdentity
    process: ProcessIdentity  # the keeper of the launcher, or the init of the session's cell
    policy: _Text
    language: _Text
    places: dict[str, _Text]  # its cgroup: controller -> directory, or "v2"
    session: _Text = ""  # the session's id
    control: _Text = ""  # the name of the socket for network rules, in the directory of the records
    cpu_seconds_before: float = 0.0  # CPU time of the cells that had the session's cgroup before


class Living(NamedTuple):
    """A record that was read: its file and its content."""

    path: "Path"
    record: LivingRecord

    @property
    def id(self) -> str:
        """`PID.N`, where PID is the process that made it."""
        return f"{self.record.supervisor.pid}.{self.path.stem.rpartition('-')[2]}"

    @property
    def control(self) -> str:
        """The path of the socket for network rules, empty without one; it may have been closed."""
        name = os.path.basename(self.record.control)
        return str(self.path.parent / name) if name else ""


class KeptRecord:
    """The record of something that this process made."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._owner = os.getpid()

    def touch(self) -> None:
        """Note that it was used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        """Remove it; in a forked child this does nothing."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def keep_record(
    kind: Literal["sandbox", "session"], pid: int, policy: str, language: str,
    places: dict[str, str], session: str = "", control: str = "", cpu_seconds_before: float = 0.0,
) -> KeptRecord | None:  # fmt: skip
    """Write a record; None where there is no directory for it, or no room: then it is not listed.

    `control` is a path that `new_socket_path` returned.
    """
    path = _new_path("json")
    if path is None:
        return None
    record = LivingRecord(
        kind, _identity(os.getpid()), _identity(pid), policy, language, places, session[:4096],
        os.path.basename(control), cpu_seconds_before,
    )  # fmt: skip
    try:
        with open(f"{path}.new", "xb") as file:
            file.write(msgspec.json.encode(record))
        os.rename(f"{path}.new", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        return None
    return KeptRecord(path)


def new_socket_path() -> str:
    """Return a path for a socket of this process in the directory of the records; empty without a
    directory. `remove_leftovers` removes the socket when the process has ended."""
    return _new_path("sock") or ""


def _new_path(kind: str) -> str | None:
    directory = _directory()
    if directory is None:
        return None
    return f"{directory}/{this_process()}-{next(_counter)}.{kind}"


def _identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, start_time(pid), pid_namespace())


def _directory() -> str | None:
    """Return the directory of new records; None if there is none that only this user can write."""
    for directory in _directories():
        with contextlib.suppress(OSError):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        if _is_ours(directory):
            return directory
    return None


def _directories() -> Iterator[str]:
    """Yield where this user's processes put records, as their environments say: a session of systemd's
    has XDG_RUNTIME_DIR, another process its home, a system service of root's neither."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    for place in (
        os.environ.get("XDG_RUNTIME_DIR", ""), cache, "" if os.geteuid() else _ROOTS_RUNTIME,
    ):  # fmt: skip
        if os.path.isabs(place):
            yield os.path.join(place, "cellwright", "living")


def _is_ours(directory: str) -> bool:
    with contextlib.suppress(OSError):
        found = os.lstat(directory)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        return ours and not found.st_mode & 0o022
    return False


def list_living() -> list[Living]:
    """Return the records of this user by id, those of dead processes included."""
    found = (_read(path) for path in _files("*-*-*.json"))
    return sorted((each for each in found if each), key=lambda each: _sort_key(each.id))


def _files(pattern: str) -> "list[Path]":
    from pathlib import Path  # slow to import, and not needed to keep a record

    places = dict.fromkeys(filter(_is_ours, _directories()))
    return [path for directory in places for path in Path(directory).glob(pattern)]


def _sort_key(id: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in id.split("."))


def _read(path: "Path") -> Living | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            text = file.read(_LONGEST)
        return Living(path, msgspec.json.decode(text, type=LivingRecord))
    except (
        OSError,
        ValueError,
    ):  # the process ended meanwhile, or the record is of another version
        return None


class LivingUse(NamedTuple):
    """The use of a launcher or session; None if nothing counts it."""

    memory_bytes: int | None
    cpu_seconds: float | None
    age_seconds: float
    idle_seconds: float | None  # for a session: seconds since its last call
    is_frozen: bool


def use_of(living: Living) -> LivingUse:
    """Return its current use."""
    record = living.record
    usage = usage_at(record.places)
    uptime = float(read("/proc/uptime").split()[0])
    age = uptime - int(record.process.start or 0) / os.sysconf("SC_CLK_TCK")
    idle = None
    if record.kind == "session":
        with contextlib.suppress(OSError):
            idle = max(0.0, time.time() - living.path.stat().st_mtime)
    used = usage.cpu_seconds
    if used is not None:
        used = max(0.0, used - record.cpu_seconds_before)
    return LivingUse(usage.memory_bytes, used, max(0.0, age), idle, usage.is_frozen)


def kill(living: Living) -> bool:
    """Kill a launcher with all its cells, or a session; return whether it lived.

    The process is held by a pidfd before it is looked at, so no other process with its number is hit.
    """
    record = living.record
    with _held(record.process, _NAMES[record.kind]) as pidfd:
        if pidfd < 0:
            return False
        _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
        thaw(record.places)  # on cgroup v1 killed processes die only when thawed
        has_news(pidfd, _END_SECONDS)
    return True


@contextlib.contextmanager
def _held(process: ProcessIdentity, name: str) -> Iterator[int]:
    """Give a pidfd of `process`, -1 if it has ended or is called otherwise than `name`."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        yield -1
        return
    try:
        with contextlib.suppress(OSError):
            if process.is_alive() and read(f"/proc/{process.pid}/comm") == f"{name}\n":
                yield pidfd
                return
        yield -1
    finally:
        os.close(pidfd)


def remove_leftovers() -> list[str]:
    """Remove what dead processes of this pid namespace left: frozen cells, cgroups, records, sockets;
    return the paths."""
    removed: list[str] = []
    for living in list_living():
        record = living.record
        if not record.supervisor.has_ended():
            continue
        kill(living)
        thaw(record.places)
        owner = f"{_PREFIX}-{record.supervisor.pid}-{record.supervisor.start}-"
        places = [place for place in record.places.values() if owner in place]
        removed += [each for each in places if os.path.isdir(each) and remove_with_cells(each)]
        with contextlib.suppress(OSError):
            living.path.unlink()
            removed.append(str(living.path))
    return removed + sweep_host() + list(_remove_control_sockets()) + list(_remove_sockets())


def _remove_control_sockets() -> Iterator[str]:
    for path in _files("*-*-*.sock"):
        if has_ended(path.name):
            with contextlib.suppress(OSError):
                path.unlink()
                yield str(path)


def directory_prefix() -> str:
    """Return how the names of directories begin that this process makes in the directory of temporary
    files, for exposed ports, locks of packages and authorities."""
    return f"{_PREFIX}-{this_process()}-"


def _remove_sockets() -> Iterator[str]:
    import tempfile  # imports twenty modules, which no sandbox needs
    from pathlib import Path

    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*-*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            ours = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
            made_by = directory.name.partition("-")[2]
            if not (ours and stat.S_ISDIR(found.st_mode) and has_ended(made_by)):
                continue
            for each in directory.iterdir():
                mode = each.lstat().st_mode
                if stat.S_ISSOCK(mode) or (each.name in _OWN_FILES and stat.S_ISREG(mode)):
                    each.unlink()
            directory.rmdir()
            yield str(directory)

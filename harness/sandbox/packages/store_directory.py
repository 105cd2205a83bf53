"""`StoreDirectory`: the directory of a store, its locks, and its unfinished files.

Locks are flock(2) of files in held/, so the kernel releases those of a process that dies.

`Deadline`: the moment by which a set of packages must be ready, and a way to end the wait
earlier.

Opens a fetched wheel in a cell, and copies the files to the host.

A wheel is hostile: nothing of it is parsed, unpacked or compiled outside the cell.  The cell writes to
its own /workspace, whose size the kernel limits; the host copies regular files from there after
everything in the cell has been killed.

The list of fonts of a set that has matplotlib, made in a cell when the set is built.

Without it the first plot in each cell looks for fonts of the host, which takes a second, and reports
the attempts that are refused.  The list is data of the set: only cells read it.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

from ....policies.errors import CellwrightError, PackageError
from ....policies.policy import MIB, Filesystem, Limits, Policy, Processes, Python
from ....runner.cells.workspace import list_all_files, read_chunks, read_file
from ....runner.concurrency import NEVER, begin_thread
from ....runner.host.interpreters import FONT_LISTS, is_font_list
from ....runner.launching.launch import LaunchArguments
from ....runner.launching.spawn import Spawned, interpreter
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.supervisor import Supervisor
from ...user_data import make_private_directory
from ..pythons import HostPython, this_python
from .lock import Wheel


class Deadline:
    """Bounds the time in which a set is resolved, fetched and built.

    `seconds`: from now on; default without end.  `cancel`: a descriptor; once it is readable, the
    caller has given up.
    """

    def __init__(self, seconds: float = math.inf, cancel: int = NEVER) -> None:
        self.seconds = seconds
        self.cancel = cancel
        self._at = time.monotonic() + seconds

    def left(self, most: float = math.inf) -> float:
        """Return the seconds that are left, at most `most`; raises PackageError if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.passed()
        return min(left, most)

    def passed(self) -> PackageError:
        """Return the error of what did not end in time."""
        return PackageError(
            f"the set of packages was not built within {self.seconds:g} s, the timeout of the call",
            "build it ahead with `cellwright env build`, or allow more time",
        )


NO_DEADLINE = Deadline()


_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_DIRECTORY
_PRIVATE = 0o600


class StoreDirectory:
    """A directory with private access, in which everything appears by a rename.

    Safe from many threads and processes.  Its methods raise PackageError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make it if it is missing; raises PackageError if others may write to it."""
        make_private_directory(self.path, PackageError)

    @contextlib.contextmanager
    def new(self) -> Iterator[str]:
        """Make a directory that goes away again, and remove those of processes that died."""
        try:
            with self._emptied() as folder:
                yield folder
        except BlockingIOError:
            raise
        except OSError as error:
            raise PackageError(f"cannot write {self.path}: {error.strerror}") from error

    @contextlib.contextmanager
    def _emptied(self) -> Iterator[str]:
        parent = self.path / "new"
        with self.locked("new"):
            parent.mkdir(0o700, exist_ok=True)
            for name in os.listdir(parent):
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    abandoned = _flock(parent / name, _OPEN, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(parent / name, ignore_errors=True)
                    os.close(abandoned)
            folder = tempfile.mkdtemp(dir=parent)
            lock = _flock(Path(folder), _OPEN, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def publish(self, made: Path, place: Path) -> None:
        """Give a whole tree its name; another process may have been first, with the same."""
        place.parent.mkdir(0o700, exist_ok=True)
        os.sync()  # so that a name never outlives a power cut without its files
        try:
            os.rename(made, place)
        except OSError:
            if not place.exists():
                raise

    def write(self, path: Path, text: str) -> None:
        """Write a file, which is there with all of `text` or not at all."""
        with self.new() as folder:
            path.parent.mkdir(0o700, exist_ok=True)
            made = Path(folder, path.name)
            made.write_text(text)
            os.rename(made, path)

    @contextlib.contextmanager
    def locked(
        self, name: str, how: int = fcntl.LOCK_EX, deadline: Deadline = NO_DEADLINE
    ) -> Iterator[None]:
        """Hold a lock; raises BlockingIOError if `how` says not to wait and another one has it."""
        lock = self.lock(name, how, deadline)
        try:
            yield
        finally:
            os.close(lock)

    def lock(self, name: str, how: int, deadline: Deadline = NO_DEADLINE) -> int:
        """Return a descriptor that holds a lock until it is closed."""
        folder = self.path / "held"
        try:
            folder.mkdir(0o700, exist_ok=True)
            return _flock_in_time(folder / name, how, deadline)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PackageError(f"cannot write {folder}: {error.strerror}") from None


def _flock_in_time(path: Path, how: int, deadline: Deadline) -> int:
    """`_flock` of a file, for which it waits until the deadline at most.

    flock(2) has no timeout: a thread waits, and lets the lock go if it comes too late.
    """
    try:
        return _flock(path, _LOCK, how | fcntl.LOCK_NB)
    except BlockingIOError:
        if how & fcntl.LOCK_NB:
            raise
    if deadline is NO_DEADLINE:
        return _flock(path, _LOCK, how)
    from concurrent.futures import Future, TimeoutError  # seldom needed

    taken: Future[int] = Future()

    def wait() -> None:
        try:
            descriptor = _flock(path, _LOCK, how)
        except OSError as error:
            if taken.set_running_or_notify_cancel():
                taken.set_exception(error)
            return
        if taken.set_running_or_notify_cancel():
            taken.set_result(descriptor)
        else:
            os.close(descriptor)

    begin_thread("cellwright-lock", wait)
    try:
        return taken.result(deadline.left())
    except (TimeoutError, PackageError):
        if taken.cancel():
            raise deadline.passed() from None
        return taken.result()  # the result came at the last moment


def _flock(path: Path, flags: int, how: int) -> int:
    """Return a descriptor that holds a lock; raises BlockingIOError if another one does and `how` says
    not to wait."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, _PRIVATE)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_SECONDS = 900.0
_MEMORY_BESIDE_FILES = 768 * MIB  # the compiler takes 500 MiB for the largest modules (measured)
# A wheel is unpacked in memory: at most this, or a quarter of max_bytes if that is more.
_MOST_WHEEL = 2048 * MIB  # torch has 1,091 MiB, tensorflow 1,900
_MOST_FILES = 50_000  # in a wheel; torch has 13,000, most of them headers
_FILE_MODE, DIRECTORY_MODE = 0o444, 0o755
_SEALED_NS = 315_532_800 * 10**9  # 1980-01-01, the first day of zip: any other time is a change

_IMPORT = re.compile(r"^from \.zip_archive import .*\n", re.MULTILINE)  # already defined there

Files = dict[str, tuple[int, str]]  # path: size, sha256


def open_wheel(
    wheel: Wheel, path: Path, target: Path, most_bytes: int,
    optional_layers: tuple[str, ...] = (), deadline: Deadline = NO_DEADLINE,
    python: HostPython | None = None,
) -> Files:  # fmt: skip
    """Unpack the wheel at `path` into the new directory `target`, and return its files.

    `most_bytes`: of the set.  Raises PackageError if the wheel is refused, too large unpacked, or not
    opened by the deadline.
    """
    files: Files = {}
    most_bytes = min(most_bytes, max(_MOST_WHEEL, most_bytes // 4))

    def keep(workspace: int) -> None:
        files.update(_copy(workspace, target, most_bytes))

    given = [str(path), "/workspace", wheel.name, wheel.version, [most_bytes, _MOST_FILES]]
    request = Request(
        code=f"{_program()}\nunpack(*{json.dumps(given)})",
        limits=_limits(most_bytes, deadline.left(_SECONDS)),
        cancel=deadline.cancel,
    )
    launch = LaunchArguments(_policy(path, request.limits, optional_layers))
    supervisor = Supervisor(launch, (python or this_python()).spawn())
    try:
        result = supervisor.execute(request, keep)
    except CellwrightError as error:
        raise PackageError(f"{wheel.filename}: {error}") from error
    finally:
        supervisor.close()
    if result.reason in ("wall_time", "cancelled"):
        deadline.left()  # raises if the deadline passed, because the cell had the same deadline
    _check(wheel, result)
    return files


def _program() -> str:
    """Return the text of both modules that run in the cell, as one."""
    folder = resources.files(__package__)
    reader, opener = (folder.joinpath(name).read_text() for name in ("zip_archive.py", "unpack.py"))
    return reader + _IMPORT.sub("", opener)


def _policy(wheel: Path, limits: Limits, optional_layers: tuple[str, ...]) -> Policy:
    return Policy(
        name="open a wheel",
        filesystem=Filesystem(read=(str(wheel),)),
        processes=Processes(threads=False),
        limits=limits,
        optional_layers=optional_layers,
    )


def _limits(most_bytes: int, seconds: float) -> Limits:
    return Limits(
        wall_seconds=seconds, cpu_seconds=_SECONDS, memory_bytes=most_bytes + _MEMORY_BESIDE_FILES,
        workspace_bytes=most_bytes, workspace_inodes=4 * _MOST_FILES, processes=1,
    )  # fmt: skip


def _check(wheel: Wheel, result: SandboxResult) -> None:
    if not result.ok:
        raise PackageError(f"{wheel.filename}: cannot be opened: {result.error or result.reason}")
    told = result.value if isinstance(result.value, dict) else {}
    if "left_out" not in told:
        why = told.get("refused", "cannot be unpacked: malformed answer from its cell")
        hint = "check where it comes from, or build it anew (pip wheel) where you trust its source"
        if str(why).startswith("unpacks to"):
            hint = (
                "raise packages.max_bytes of the policy; a wheel may have 2 GiB, or a quarter of it "
                "if that is more"
            )
        raise PackageError(f"{wheel.filename} {str(why)[:500]}", hint)


def _copy(workspace: int, target: Path, most_bytes: int) -> Files:
    """Copy the regular files of a cell at rest, sealed: read-only and of one time.

    Raises PackageError if they claim more than `most_bytes`, which the cell could write: some are
    sparse, or one file has many names.
    """
    found: Files = {}
    listing = list_all_files(workspace, 2 * _MOST_FILES)  # modules, and their bytecode
    if (total := sum(seen.size_bytes for seen in listing.values())) > most_bytes:
        raise PackageError(f"unpacks to {total} bytes, at most {most_bytes}")
    for path, seen in listing.items():
        copy = target / path
        copy.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        found[path] = write_sealed(copy, read_chunks(workspace, path, seen.size_bytes))
    return found


def write_sealed(path: Path, content: Iterable[bytes]) -> tuple[int, str]:
    """Write a file that is read-only and of one time; return its size and digest."""
    size, digest = 0, hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with open(descriptor, "wb") as file:
        for chunk in content:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fchmod(descriptor, _FILE_MODE)  # independent of the umask
        os.utime(descriptor, ns=(_SEALED_NS, _SEALED_NS))
    return size, digest.hexdigest()


def is_sealed(found: os.stat_result, size: int) -> bool:
    """Return whether a file has the size, mode and time that it was sealed with."""
    return (found.st_size, found.st_mode, found.st_mtime_ns) == (
        size, stat.S_IFREG | _FILE_MODE, _SEALED_NS,
    )  # fmt: skip


_FONTS_SECONDS = 60.0
_MEMORY = 1024 * MIB
_MOST_BYTES = 4 * MIB
_PROGRAM = """
import os
os.environ["MPLCONFIGDIR"] = "/workspace"
import matplotlib.font_manager
"""


def add_font_list(site: Path, optional_layers: tuple[str, ...], deadline: Deadline) -> Files:
    """Add the list of fonts to the set in `site` if it has matplotlib, and return the new files.

    A matplotlib that cannot be imported adds none.  Raises PackageError after the deadline.
    """
    place = site / FONT_LISTS
    if place.exists() or not (site / "matplotlib" / "font_manager.py").is_file():
        return {}
    limits = Limits(wall_seconds=deadline.left(_FONTS_SECONDS), memory_bytes=_MEMORY)
    policy = Policy(
        name="list fonts", python=Python(path=(str(site),)), limits=limits,
        optional_layers=optional_layers,
    )  # fmt: skip
    made: dict[str, bytes] = {}

    def keep(workspace: int) -> None:
        made.update(_font_lists(workspace))

    supervisor = Supervisor(LaunchArguments(policy), Spawned(interpreter()))
    try:
        request = Request(code=_PROGRAM, limits=limits, cancel=deadline.cancel)
        supervisor.execute(request, keep)
    except CellwrightError as error:
        raise PackageError(f"cannot list the fonts of matplotlib: {error}") from error
    finally:
        supervisor.close()
    deadline.left()
    if made:
        place.mkdir(DIRECTORY_MODE)
        place.chmod(DIRECTORY_MODE)  # independent of the umask
    return {
        f"{FONT_LISTS}/{name}": write_sealed(place / name, (content,))
        for name, content in made.items()
    }


def _font_lists(workspace: int) -> dict[str, bytes]:
    return {
        path: read_file(workspace, path, seen.size_bytes)
        for path, seen in list_all_files(workspace).items()
        if is_font_list(path) and seen.size_bytes <= _MOST_BYTES
    }

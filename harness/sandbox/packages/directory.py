"""`StoreDirectory`: the directory of a store, its locks, and what is being made in it.

Locks are flock(2) of files in held/, so the kernel releases those of a process that dies.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ....policies.errors import PackageError
from ....runner.threads import begin
from ...state import make_private_directory
from .deadline import NO_DEADLINE, Deadline

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

    begin("cellwright-lock", wait)
    try:
        return taken.result(deadline.left())
    except (TimeoutError, PackageError):
        if taken.cancel():
            raise deadline.passed() from None
        return taken.result()  # it came at the last moment


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

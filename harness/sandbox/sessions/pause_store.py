"""`PausedStates`: the directory of paused sessions, with a quota and an expiry.

`OwnedDirectory`: a directory inside another, for files that are of no use once their process ended.

Its process holds a lock on it (flock(2)), which the kernel releases when that process ends, however it
ends. So other processes can tell whether a file is still in use.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ....policies.errors import LaunchError, PauseError
from ....runner.concurrency import begin_thread
from ....runner.settings import PauseSettings
from ...user_data import key_of, make_private_directory, state_directory
from .state_file import PauseToken, StateWriter, is_encrypted_until, pieces

_STATE, _PART, _IMAGE = ".session", ".part", ".image"
_PART_SECONDS = 3600.0  # after so long an unfinished file is removed
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PausedStates:
    """The files of paused sessions; safe from many threads and processes."""

    def __init__(self, settings: PauseSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()  # guards the next ones
        self._threads: list[threading.Thread] = []
        self._owned: OwnedDirectory | None = None
        self._own: set[str] = set()  # ids of states that this sandbox wrote
        self._bound: set[str] = set()  # ids of states that are useless once this sandbox is closed
        self._written: dict[str, int] = {}  # id -> bytes of a state that this sandbox wrote
        self._process = os.getpid()
        given = settings.directory
        self.directory = Path(given) if given is not None else state_directory() / "paused"

    def _open_directory(self) -> int:
        make_private_directory(self.directory, PauseError)
        return os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _name_of(self, token: PauseToken) -> str:
        name = token.id + _STATE
        with self._lock:
            return f"{self._owned.name}/{name}" if self._owned and token.id in self._own else name

    def _own_name_of(self, token: PauseToken, directory: int) -> str:
        """Return the name of a state that only this process can resume."""
        with self._lock:
            self._owned = self._owned or OwnedDirectory(directory)
            self._own.add(token.id)
        return self._name_of(token)

    def _bind(self, token: PauseToken) -> None:
        with self._lock:
            self._bound.add(token.id)

    def _forget(self, token: PauseToken) -> None:
        with self._lock:
            self._own.discard(token.id)
            self._bound.discard(token.id)

    @contextlib.contextmanager
    def writing(
        self, token: PauseToken, *, is_own: bool = False, is_bound: bool = False
    ) -> Iterator[StateWriter]:
        """Yield the writer of a token's state. When the block ends the state exists completely, or not
        at all. Raises PauseError.

        A state that `is_own` has a token that only this process knows, so it is useless once this
        process has ended. One that `is_bound` is removed by `close`.
        """
        settings = self._settings
        key = None if settings.key is None else key_of(settings.key)
        with _closing(self._open_directory()) as directory, _with_errors_of("write"):
            left = self._left(directory)
            part = token.id + _PART
            with _closing(os.open(part, _CREATE, 0o600, dir_fd=directory)) as file:
                try:
                    until = self._clock() + settings.keep_seconds
                    most = min(left, settings.most_bytes)
                    yield StateWriter(file, token, key, until, most)
                    os.fsync(file)
                    name = self._own_name_of(token, directory) if is_own else self._name_of(token)
                    os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
                    if settings.sandbox_bytes is not None:
                        with self._lock:
                            self._written[token.id] = os.fstat(file).st_size
                    if is_bound and not is_own:
                        self._bind(token)
                except BaseException:
                    os.unlink(part, dir_fd=directory)
                    raise

    def _left(self, directory: int) -> int:
        left = self._settings.quota_bytes - self._sweep(directory)
        most = self._settings.sandbox_bytes
        if most is None:
            return left
        there = {name.rpartition("/")[2] for name in _files_in(directory)}
        with self._lock:
            self._written = {id: size for id, size in self._written.items() if id + _STATE in there}
            return min(left, most - sum(self._written.values()))

    @contextlib.contextmanager
    def taking(self, token: PauseToken) -> Iterator[Iterator[tuple[bytes, memoryview]]]:
        """Yield the verified pieces of a state, which is removed if the block ends well.

        Raises PauseError if it is not there, expired, in use, another user's, or was changed.
        """
        settings, name = self._settings, self._name_of(token)
        with _closing(self._open_directory()) as directory, _with_errors_of("read"):
            try:
                opened = os.open(name, _OPEN, dir_fd=directory)
            except OSError as error:
                raise _not_found(error) from None
            with contextlib.ExitStack() as closing:
                file = closing.enter_context(_closing(opened))
                _require_own(file)
                is_encrypted, until = is_encrypted_until(file)
                if until <= self._clock():
                    raise PauseError(
                        "token: this session was paused for longer than it is kept",
                        "more pauses.keep_seconds keeps it longer",
                        is_final=True,
                    )
                if is_encrypted and settings.key is None:
                    raise PauseError("token: this session was paused with a key", "pauses.key")
                key = key_of(settings.key) if is_encrypted and settings.key is not None else None
                if settings.key is not None and not is_encrypted:
                    raise PauseError(
                        "token: this session was paused without a key", "leave out pauses.key"
                    )
                yield pieces(file, token, key, until)
                os.unlink(name, dir_fd=directory)
                self._forget(token)
                self._close_later(closing.pop_all())

    def _close_later(self, closing: contextlib.ExitStack) -> None:
        """Close a file without a name in a thread: only then the kernel frees its blocks, and waits for
        the disk."""
        try:
            thread = begin_thread("cellwright-paused", closing.close)
        except LaunchError:
            closing.close()
            return
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def settle(self) -> None:
        """Wait until nothing is left of the states that were taken."""
        with self._lock:
            threads = self._threads
        for each in threads:
            each.join()

    def remove(self, token: PauseToken) -> None:
        """Remove the file of a state, if there is one; raises PauseError."""
        missing = contextlib.suppress(FileNotFoundError)
        with _closing(self._open_directory()) as directory, _with_errors_of("remove"), missing:
            os.unlink(self._name_of(token), dir_fd=directory)
            self._forget(token)

    def give_away(self, token: PauseToken, *, is_bound: bool = False) -> None:
        """Let others know of a state that was this process's own, see `writing`; raises PauseError."""
        with _closing(self._open_directory()) as directory, _with_errors_of("keep"):
            name = self._name_of(token)
            os.rename(name, token.id + _STATE, src_dir_fd=directory, dst_dir_fd=directory)
            self._forget(token)
            if is_bound:
                self._bind(token)

    def sweep(self) -> None:
        """Remove expired states, and states that only an ended process could resume; raises
        PauseError."""
        if self.directory.exists():
            with _closing(self._open_directory()) as directory, _with_errors_of("remove"):
                self._sweep(directory)

    def close(self) -> None:
        """Remove the states that are bound, and give up those that only this process can resume,
        which are removed by then. Removes nothing in a forked child of the process that made this."""
        self.settle()
        with self._lock:
            owned, self._owned = self._owned, None
            bound, self._bound = self._bound, set()
        if owned or bound:
            with _closing(self._open_directory()) as directory:
                for each in bound if self._process == os.getpid() else ():
                    with contextlib.suppress(OSError):
                        os.unlink(each + _STATE, dir_fd=directory)
                if owned:
                    owned.close(directory)

    def keep_image(self, digest: str, image: int) -> None:
        """Keep the image of a launcher, for as long as the states that need it."""
        with _closing(self._open_directory()) as directory, _with_errors_of("write"):
            name, part = digest + _IMAGE, f"{os.urandom(16).hex()}{_PART}"
            with contextlib.suppress(FileNotFoundError):
                os.utime(name, dir_fd=directory)
                return
            with _closing(os.open(part, _CREATE, 0o600, dir_fd=directory)) as file:
                size, at = os.fstat(image).st_size, 0
                while at < size:
                    at += os.sendfile(file, image, at, size - at)
                os.fsync(file)
            os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)

    def image(self, digest: str) -> int | None:
        """Return a copy of an image in memory, None if it is not there; raises PauseError if it was
        changed."""
        with _closing(self._open_directory()) as directory, _with_errors_of("read"):
            try:
                opened = os.open(digest + _IMAGE, _OPEN, dir_fd=directory)
            except FileNotFoundError:
                return None
            with _closing(opened) as file:
                _require_own(file)
                if os.fstat(file).st_size > self._settings.quota_bytes:
                    raise PauseError("token: the image that this paused session needs was changed")
                with open(os.dup(file), "rb") as reading:
                    data = reading.read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise PauseError("token: the image that this paused session needs was changed")
        copy = os.memfd_create("image", os.MFD_CLOEXEC)
        with open(os.dup(copy), "wb") as writing:
            writing.write(data)
        return copy

    def _sweep(self, directory: int) -> int:
        used, now = 0, self._clock()
        for name in _files_in(directory):
            with contextlib.suppress(OSError, PauseError):
                if name.endswith((_STATE, _PART, _IMAGE)):
                    if self._has_expired(directory, name, now):
                        os.unlink(name, dir_fd=directory)
                    else:
                        used += os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
        return used

    def _has_expired(self, directory: int, name: str, now: float) -> bool:
        modified = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
        if name.endswith(_PART):
            return modified + _PART_SECONDS < now
        if name.endswith(_IMAGE):
            return modified + self._settings.keep_seconds < now
        with _closing(os.open(name, _OPEN, dir_fd=directory)) as file:
            return is_encrypted_until(file)[1] <= now


def _files_in(directory: int) -> Iterator[str]:
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            yield from files_of(directory, name)


def _require_own(file: int) -> None:
    """Lock a file, for as long as it is open; raises PauseError if it is not this user's alone, or is
    locked."""
    status = os.fstat(file)
    mode = status.st_mode
    if not stat.S_ISREG(mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise PauseError("token: the state of this paused session is not this user's alone")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PauseError("token: this session is being resumed by another caller") from None
    if not os.fstat(file).st_nlink:  # the state has just been resumed
        raise _not_found(None)


def _not_found(error: OSError | None) -> PauseError:
    if error and not isinstance(error, FileNotFoundError):
        return PauseError(f"token: the paused session cannot be read: {error.strerror}")
    return PauseError(
        "token: no such paused session",
        "it was resumed already, has expired, or is elsewhere; without pausable=True it ends with its "
        "sandbox",
        is_final=True,
    )


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _with_errors_of(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PauseError(f"cannot {action} a paused session: {error.strerror}") from None


_SUFFIX = ".owned"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnedDirectory:
    """A directory that is removed by `close`, or by `files_of` of another process once its own has
    ended."""

    def __init__(self, parent: int) -> None:
        """Make it in the directory `parent`; raises OSError."""
        self._owner = os.getpid()
        while not self._is_made(parent):
            continue

    def _is_made(self, parent: int) -> bool:
        """Make it, unless another process takes it for one without an owner before it is locked."""
        self.name = secrets.token_hex(16) + _SUFFIX
        os.mkdir(self.name, 0o700, dir_fd=parent)
        try:
            self._opened = os.open(self.name, _OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            return False
        with contextlib.suppress(FileNotFoundError):
            if _lock(self._opened):
                found = os.stat(self.name, dir_fd=parent, follow_symlinks=False)
                if os.path.samestat(found, os.fstat(self._opened)):
                    return True
        os.close(self._opened)
        return False

    def close(self, parent: int) -> None:
        """Remove it, if it is empty, and give it up; removes nothing in a forked child of its owner."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner:
                os.rmdir(self.name, dir_fd=parent)
        os.close(self._opened)


def files_of(parent: int, name: str) -> list[str]:
    """Return the names, relative to `parent`, in such a directory; remove it if its owner has ended.
    A name that is of no such directory is returned itself. Raises OSError."""
    if not name.endswith(_SUFFIX):
        return [name]
    opened = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
    try:
        names = os.listdir(opened)
        if not _lock(opened):
            return [f"{name}/{each}" for each in names]
        for each in names:
            os.unlink(each, dir_fd=opened)
        os.rmdir(name, dir_fd=parent)
        return []
    finally:
        os.close(opened)


def _lock(opened: int) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

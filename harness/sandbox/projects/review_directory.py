"""`ReviewDirectory`: where a reviewed command leaves what it changed, in place of the project.

upper, work    of an overlay (overlayfs) whose lower layer is the project
copied         is there if no overlay can be had: `upper` is a copy of the project (copied_view.py)
change.json    of which project and since when
journal.json   a request to apply or discard that was begun (change_journal.py)
applied.json   what was applied while other changes still wait
index          of git as the project had it then
removed        what is about to be removed
lock           held by a run, and by a review
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ....policies.digest import digest
from ....policies.errors import BusyError, WorkspaceError
from ....policies.plan import COPIED
from ....runner.kernel.file_calls import open_plain
from ...user_data import make_private_directory, replace_file, state_directory

if TYPE_CHECKING:
    from .change_journal import Places


class PendingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change that waits: the project, what the first command was, and when it started, as the
    project's file system counts time (st_ctime of stat(2)); and the paths that a command's caller
    protected."""

    root: str
    command: tuple[str, ...]
    started_ctime_ns: int
    protected: tuple[str, ...] = ()


def name_of(root: str) -> str:
    """Return the name of the project's own directories in those of the user."""
    return f"{os.path.basename(root)}-{digest(os.fsencode(root)).hex()[:12]}"


def staging_name(root: str) -> str:
    """Return the name of the directory in the project that has new content while it is applied."""
    return f".cellwright-{name_of(root)[-12:]}"


class ReviewDirectory:
    """The directory of the project at `root`; the class makes and reads nothing by itself."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = Path(os.path.realpath(state_directory()), "changes", name_of(root))
        self.upper = self.path / "upper"

    def pending(self) -> PendingChange | None:
        """Return the change that waits, None if there is none; raises WorkspaceError."""
        try:
            found = msgspec.json.decode(
                (self.path / "change.json").read_bytes(), type=PendingChange
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # a DecodeError, or invalid UTF-8
            raise WorkspaceError(f"{self.path}/change.json cannot be read: {error}") from None
        return found

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; raises BusyError while a command, or another review, has it."""
        make_private_directory(self.path, WorkspaceError)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BusyError(
                f"a command or a review has the changes of {self.root}", "wait for its end"
            ) from None
        try:
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def opened(self) -> "Iterator[Places]":
        """Open the project and the upper directory, to read and apply changes; raises OSError."""
        from .change_journal import Places
        from .upper import DIRECTORY

        for name in ("upper", "work"):
            (self.path / name).mkdir(exist_ok=True)
        project = open_plain(os.fsencode(self.root), DIRECTORY)
        try:
            upper = os.open(self.upper, DIRECTORY)
            try:
                yield Places(project, upper, staging_name(self.root), self.path / "journal.json")
            finally:
                os.close(upper)
        finally:
            os.close(project)

    def begin(self, command: Sequence[str], protected: Sequence[str] = ()) -> None:
        """Make what an overlay needs; a change that waits already goes on, with all paths that are or
        were `protected`. The lock is held."""
        from .change_journal import finish, tidy  # a command without review needs none of them
        from .git_index import keep_index

        if self.pending() is not None:
            with self.opened() as places:
                finish(places)
                tidy(places)
        root = os.stat(self.root)
        for name in ("upper", "work"):
            place = self.path / name
            place.mkdir(exist_ok=True)
            place.chmod(
                root.st_mode & 0o777
            )  # the overlay shows the mode of `upper` for the project
        before = self.pending()
        if before is None:
            change = PendingChange(
                root=self.root, command=tuple(command), started_ctime_ns=_now(self.root)
            )
            with self.opened() as places:
                keep_index(places.project, places.index)
        else:
            change = before
        every = tuple(sorted({*change.protected, *protected}))
        if before is None or every != before.protected:
            change = msgspec.structs.replace(change, protected=every)
            replace_file(self.path / "change.json", msgspec.json.encode(change))
        if (self.path / COPIED).exists():
            self.copy()

    def copy(self) -> None:
        """Have the command work on a copy from now on; raises WorkspaceError.  The lock is held."""
        from .copied_view import complete  # seldom needed

        with self.opened() as places:
            complete(places.upper, places.project)
        (self.path / COPIED).touch()


def _now(root: str) -> int:
    """Return the time that a change in the project would get now: that of a file which is made there
    and is gone at once."""
    with contextlib.suppress(OSError):
        made = os.open(root, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(made).st_ctime_ns
        finally:
            os.close(made)
    return os.stat(root).st_ctime_ns

"""Locks on files: the supervisor decides which of them a cell gets, and counts them.

A record lock (fcntl(2), F_SETLK) is kernel memory that no cgroup counts (CVE-2022-0480): a program
made a million of them, 188 MiB, in seven seconds of CPU time.  A lock on a file of the host, which
reading is enough for, keeps programs of the host waiting.  So the filter leaves these calls to here:

- On a read-only mount a shared lock succeeds and is not made: in the cell nothing can conflict with
  it.  An exclusive flock(2) is refused.
- Elsewhere a lock is the kernel's own; past `_MOST_RANGES` record locks the answer is ENOLCK.

The kernel makes the call after the answer, with the file that the descriptor then refers to. In a
process with one thread this cannot change meanwhile. In one of several, flock(2) is done here, on the
very file that was looked at; after a record lock, which ends as soon as its descriptor is closed, the
descriptor is looked at again, and again for a second: a cell that won the race is killed.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from ..kernel import notifications
from ..kernel import process_calls as processes
from ..kernel.notifications import Notification, int32

LOOK_SECONDS = 0.02  # pause between two looks at waiting locks and possible races
_MOST_RANGES = 1024  # ranges of a cell; a program with half as many never gets ENOLCK
_ADDED_BY_A_CALL = 2  # at most two, because a lock in the middle of another one splits it
_CALLS_BETWEEN_COUNTS = 256
_MOST_PARKED = 64
_DOUBT_SECONDS = 1.0
_SET_RECORD_LOCKS = (6, 7)  # F_SETLK and F_SETLKW on 64-bit machines
_FDINFO_BYTES = 1 << 20
_SHARED = "locks: none where programs shared their descriptors (LeakSanitizer)"
_NOT_OURS = "locks: a file that may not be written may not be locked for one alone"

# arguments: the call's notification, its name, the rule that refuses it
Note = Callable[[Notification, str, str], None]
_Place = tuple[int, int]  # (process, descriptor in it)


class _Parked(NamedTuple):
    """An flock(2) that waits for another process's lock, with our descriptor of its file."""

    notification: Notification
    file: int
    operation: int


class Locks:
    """Answers the calls of one cell that set locks on files."""

    def __init__(self, listener: int, calls: dict[int, str], note: Note) -> None:
        """`calls` as `Plan.locks`; `note` records a refusal while the call still waits."""
        self._listener = listener
        self._calls = calls
        self._note = note
        self._may_hold: dict[_Place, int] = {}  # upper bound of a process's record locks
        self._calls_since_count = _CALLS_BETWEEN_COUNTS
        self._doubted_until: dict[_Place, float] = {}
        self._parked: list[_Parked] = []
        self._is_shared = False

    def share(self, process: int) -> bool:
        """Note that a process will share its table of descriptors with another one, which may keep its
        locks and change its descriptors; return False if a lock of it is in doubt, and it may not.

        From then on nothing tells whose record locks are whose, so no more of them are set.
        """
        self._is_shared = self._is_shared or all(at != process for at, _ in self._doubted_until)
        return self._is_shared

    def takes(self, notification: Notification) -> bool:
        """Return whether `notification` is a call that sets a lock."""
        call = self._calls.get(notification.number)
        return call == "flock" or (
            call == "fcntl" and int32(notification.arguments[1]) in _SET_RECORD_LOCKS
        )

    def answer(self, notification: Notification) -> None:
        """Answer a call."""
        try:
            if self._calls[notification.number] == "flock":
                self._answer_flock(notification)
            else:
                self._answer_record_lock(notification)
        except OSError as error:  # no such descriptor, or no permission to look at this process
            is_unknown = error.errno in (errno.ENOENT, errno.EBADF)
            self._refuse(notification, errno.EBADF if is_unknown else errno.ENOLCK)

    @property
    def needs_look(self) -> bool:
        """Return whether `look_again` has something to do."""
        return bool(self._parked or self._doubted_until)

    def look_again(self) -> str:
        """Answer waiting calls that can be answered now; return how the cell tricked us, "" if it
        did not."""
        waiting, self._parked = self._parked, []
        for parked in waiting:
            self._try_flock(parked)
        now = time.monotonic()
        for place, end in tuple(self._doubted_until.items()):
            if _is_locked_though_read_only(place):
                return "locked a file of the host"
            if now > end:
                del self._doubted_until[place]
        return ""

    def close(self) -> None:
        """Close the files of waiting calls; may be called twice."""
        for parked in self._parked:
            os.close(parked.file)
        self._parked.clear()

    # record locks

    def _answer_record_lock(self, notification: Notification) -> None:
        process, is_alone = process_of(notification.thread)
        place = process, int32(notification.arguments[0])
        if _is_read_only(_path(notification.thread, place[1])):
            return notifications.succeed(self._listener, notification)
        if self._is_shared:
            return self._refuse(notification, errno.ENOLCK, _SHARED)
        if not self._has_room():
            return self._refuse(notification, errno.ENOLCK)
        self._may_hold[place] = self._may_hold.get(place, 0) + _ADDED_BY_A_CALL
        if not is_alone:
            self._doubted_until[place] = time.monotonic() + _DOUBT_SECONDS
        return notifications.let_go_on(self._listener, notification)

    def _has_room(self) -> bool:
        """Return whether one more call keeps the cell within its ranges.

        Adds up the locks that calls may have added. Only if the sum is too large it counts the locks,
        which takes milliseconds and is not repeated for a while.
        """
        self._calls_since_count += 1
        most = _MOST_RANGES - _ADDED_BY_A_CALL
        if sum(self._may_hold.values()) > most and self._calls_since_count > _CALLS_BETWEEN_COUNTS:
            self._calls_since_count = 0
            self._may_hold = {
                place: held for place in self._may_hold if (held := self._held(place))
            }
        return sum(self._may_hold.values()) <= most

    def _held(self, place: _Place) -> int:
        try:
            return _locks_at(place)
        except OSError:  # no permission any more: assume that nothing has changed
            return self._may_hold[place]

    # flock

    def _answer_flock(self, notification: Notification) -> None:
        process, is_alone = process_of(notification.thread)
        descriptor, operation = map(int32, notification.arguments[:2])
        if is_alone and not self._is_shared:
            if _is_read_only(_path(notification.thread, descriptor)):
                return self._lock_nothing(notification, operation)
            return notifications.let_go_on(self._listener, notification)
        file = copied(process, descriptor)
        # The number of a dead process may belong to another process by now, outside the cell.
        if notifications.is_waiting(self._listener, notification) and not _is_read_only(file):
            return self._try_flock(_Parked(notification, file, operation))
        os.close(file)
        return self._lock_nothing(notification, operation)

    def _lock_nothing(self, notification: Notification, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            self._refuse(notification, errno.EPERM, _NOT_OURS)
        else:
            notifications.succeed(self._listener, notification)

    def _try_flock(self, parked: _Parked) -> None:
        """Lock and answer, or park a call that may wait: the kernel does not report that a lock was
        freed."""
        if not notifications.is_waiting(self._listener, parked.notification):
            os.close(parked.file)  # the caller has died, or a signal interrupted its call
            return
        may_wait = not parked.operation & fcntl.LOCK_NB and len(self._parked) < _MOST_PARKED
        try:
            fcntl.flock(parked.file, parked.operation | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK and may_wait:
                self._parked.append(parked)
                return
            self._refuse(parked.notification, error.errno or errno.ENOLCK)
        else:
            notifications.succeed(self._listener, parked.notification)
        os.close(parked.file)

    def _refuse(self, notification: Notification, number: int, rule: str = "") -> None:
        if rule:
            self._note(notification, self._calls[notification.number], rule)
        notifications.refuse(self._listener, notification, number)


def _path(task: int, descriptor: int) -> str:
    return f"/proc/{task}/fd/{descriptor}"


def process_of(thread: int) -> tuple[int, bool]:
    """Return the process of a thread, and whether it has only one thread."""
    if os.stat(f"/proc/{thread}/task").st_nlink == 3:  # ".", "..", and one entry
        return thread, True
    with open(f"/proc/{thread}/status", "rb") as file:
        status = file.read()
    return int(status.partition(b"\nTgid:")[2].split(maxsplit=1)[0]), False


def copied(process: int, descriptor: int) -> int:
    pidfd = os.pidfd_open(process)
    try:
        return processes.copy_descriptor(pidfd, descriptor)
    finally:
        os.close(pidfd)


def _is_read_only(file: str | int) -> bool:
    """Return whether the mount of a file is read-only.  Devices count as read-only: they belong to
    the host, whatever their mount says."""
    if os.statvfs(file).f_flag & os.ST_RDONLY:
        return True
    return stat.S_ISCHR(os.stat(file).st_mode)


def _locks_at(place: _Place) -> int:
    """Count the record locks that a process holds on the file at `place` (proc_pid_fdinfo(5))."""
    for task in _tasks(place[0]):
        gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)
        with gone, open(f"/proc/{task}/fdinfo/{place[1]}", "rb") as file:
            return file.read(_FDINFO_BYTES).count(b" POSIX ")
    return 0


def _is_locked_though_read_only(place: _Place) -> bool:
    for task in _tasks(place[0]):
        with contextlib.suppress(OSError):  # the file is closed, and its lock with it
            return _is_read_only(_path(task, place[1])) and _locks_at(place) > 0
    return False


def _tasks(process: int) -> list[int]:
    """Return the threads of a process: any living one shows its descriptors; a main thread that
    ended shows none while the others live on."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return sorted(map(int, os.listdir(f"/proc/{process}/task")))
    return []

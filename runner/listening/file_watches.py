"""`FileWatches`: makes the watches of one cell's inotify(7) descriptors.

The kernel reports all events of an inode, through every mount and by every process. A watch on a file
that the host has too, such as /usr or /dev/null, would reveal the activity of the host's programs. So a
program watches:

- the memory file systems of its cell: anything;
- a regular file or directory of the host that it may write: changes, which stat(2) tells too, and no
  reading.  Not in cells of root, whose id has other rights in these directories than this process;
- all else: an empty file in memory in its place, which never changes.  An error would end programs that
  watch their own read-only files.

The path is read once, and resolved here, within the file system where it begins. The target of an
absolute link begins again; a relative link that leads out of the file system counts as all else.  The
kernel charges watches to the user namespace that the descriptor was made in, and events to its maker's
cgroup: the cell's.
"""

import errno
import os
import stat

from ...policies.plan import Plan
from ...policies.policy import lies_in
from ..fixed_root import LIKE_TMP
from ..kernel import file_calls as files
from ..kernel import notifications
from ..kernel.notifications import Notification
from .locks import copied, process_of
from .waiting_call import text_at

_MOST_NAME = 4096  # PATH_MAX, with the NUL
_MOST_LINKS, _MOST_PARTS = 8, 64  # absolute links of a path, and parts of a path with one
_CHANGES = 0xFCE  # IN_MODIFY to IN_MOVE_SELF without IN_CLOSE_NOWRITE and IN_OPEN
_READING = 0x31  # IN_ACCESS, IN_CLOSE_NOWRITE, IN_OPEN
_ONLY_DIRECTORY, _DONT_FOLLOW, _ONLY_NEW = 0x0100_0000, 0x0200_0000, 0x1000_0000


class FileWatches:
    """The watches of one cell."""

    def __init__(self, listener: int, plan: Plan) -> None:
        self._listener = listener
        self._own = _own_places(plan)
        self._places = {**self._own}  # path prefix in the guest -> its mount
        if os.geteuid():
            self._places |= {bind.path: bind.path for bind in plan.binds if bind.writable}
        self._stand_in = -1

    def answer(self, notification: Notification) -> None:
        """Make the watch that a call asks for, and have the call return its number."""
        try:
            watch = self._add(notification)
        except OSError as error:
            notifications.refuse(self._listener, notification, error.errno or errno.EIO)
        else:
            notifications.succeed(self._listener, notification, watch)

    def close(self) -> None:
        if self._stand_in >= 0:
            os.close(self._stand_in)

    def _add(self, notification: Notification) -> int:
        thread, (descriptor, address, mask, *_) = notification.thread, notification.arguments
        name = text_at(thread, address, _MOST_NAME)
        if not name or len(name) >= _MOST_NAME:
            number = errno.ENAMETOOLONG if name else errno.ENOENT
            raise OSError(number, os.strerror(number))
        inotify = copied(process_of(thread)[0], descriptor & 0xFFFFFFFF)
        try:
            file, mask = self._file(thread, os.fsdecode(name), mask & 0xFFFFFFFF)
            try:
                # The number of a dead process may belong to another process by now, outside the cell.
                if not notifications.is_waiting(self._listener, notification):
                    raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
                return files.watch(notification.number, inotify, file, mask & ~_DONT_FOLLOW)
            finally:
                os.close(file)
        finally:
            os.close(inotify)

    def _file(self, thread: int, name: str, mask: int, links: int = _MOST_LINKS) -> tuple[int, int]:
        """Return a new descriptor of the file to watch, and the events to watch for."""
        path = _absolute(thread, name)
        above = [place for place in self._places if lies_in(path, (place,))]
        place = max(above, key=len, default=None)
        if place in self._own:
            is_own, allowed = True, mask
        else:
            is_own, allowed = False, mask & ~_READING
        if place is None or not (is_own or allowed & _CHANGES):
            return self._in_its_place(mask)
        follow = os.O_NOFOLLOW if mask & _DONT_FOLLOW else 0
        rest = path[len(place) :].lstrip("/") or "."
        try:
            file = _open(thread, self._places[place], rest, follow, may_wait=is_own)
        except OSError as error:
            if error.errno == errno.EXDEV and links:
                path = _through_link(thread, self._places[place], rest, follow, may_wait=is_own)
                if path:
                    return self._file(thread, path, mask, links - 1)
            if error.errno in (errno.EXDEV, errno.EAGAIN):  # outside of the cell, or blocking
                return self._in_its_place(mask)
            raise
        if is_own or _is_plain(file):
            return file, allowed
        os.close(file)
        return self._in_its_place(mask)

    def _in_its_place(self, mask: int) -> tuple[int, int]:
        if self._stand_in < 0:
            self._stand_in = os.memfd_create("watched", os.MFD_CLOEXEC)
        return os.dup(self._stand_in), mask & ~(_ONLY_DIRECTORY | _ONLY_NEW)


def _own_places(plan: Plan) -> dict[str, str]:
    shown = tuple(bind.path for bind in plan.binds)
    links = (place for place in LIKE_TMP if not lies_in(place, shown))
    own = dict.fromkeys(links, "/tmp")  # noqa: S108 - inside the cell
    own |= {each.target: each.target for each in plan.tmpfs}
    if plan.image:
        own = {"": "/", **{place: at for place, at in own.items() if place not in LIKE_TMP}}
    return own | {each.also: each.also for each in plan.tmpfs if each.also}


def _absolute(thread: int, name: str) -> str:
    """Return a path from the root of the cell; `..` is left to the kernel, which follows links."""
    if not name.startswith("/"):
        name = f"{os.readlink(f'/proc/{thread}/cwd')}/{name}"
    return "/" + "/".join(each for each in name.split("/") if each not in ("", "."))


def _open(thread: int, place: str, rest: str, flags: int, *, may_wait: bool) -> int:
    """Open the file at `rest` in the file system at `place`.

    Raises OSError, EXDEV if that leads out of the file system, and EAGAIN if it took waiting for a
    disk or a server and that is not allowed.
    """
    root = os.open(f"/proc/{thread}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = files.open_within(root, os.fsencode(place[1:] or "."), os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(root)
    if rest == ".":
        return top
    try:
        wanted = os.O_PATH | os.O_CLOEXEC | flags
        return files.open_on_mount(top, os.fsencode(rest), wanted, may_wait=may_wait)
    finally:
        os.close(top)


def _through_link(thread: int, place: str, rest: str, flags: int, *, may_wait: bool) -> str:
    """Return the path that the first absolute link in `rest` makes of it, or "" without one."""
    parts = rest.split("/")
    followed = len(parts) - bool(flags & os.O_NOFOLLOW) if len(parts) <= _MOST_PARTS else 0
    for count in range(1, followed + 1):
        try:
            file = _open(thread, place, "/".join(parts[:count]), os.O_NOFOLLOW, may_wait=may_wait)
        except OSError:
            return ""
        try:
            is_link = stat.S_ISLNK(os.fstat(file).st_mode)
            target = os.readlink("", dir_fd=file) if is_link else ""
        finally:
            os.close(file)
        if target.startswith("/"):
            return "/".join([target, *parts[count:]])
    return ""


def _is_plain(file: int) -> bool:
    """Tell whether it is a file or directory: all processes of the host use the same devices."""
    mode = os.fstat(file).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)

"""A copy of a project in place of an overlay, where no overlay can be had.

The copy is the upper directory of an overlay that hides the whole project, so everything else about
reviews is the same.
"""

import fcntl
import os
import stat

from ....policies.errors import WorkspaceError
from .upper import OPAQUE, open_directory

_MOST_BYTES = 1 << 30  # files that share their blocks with the project (reflink) do not count
_MOST_ENTRIES = 200_000
_FICLONE = 0x40049409  # linux/fs.h; on Btrfs and XFS the copy shares its blocks
_CHUNK = 1 << 24
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_HINT = "keep the state in a directory where an overlay works, such as one on ext4: XDG_STATE_HOME"


def complete(upper: int, project: int) -> None:
    """Copy into the open directory `upper` what it lacks of the open directory `project`, unless it
    hides the project already.  Removals that wait, which are whiteouts, are carried out.

    Other file systems, sockets, pipes and devices are left out.  Raises WorkspaceError beyond the
    bounds, and for a file that cannot be read.
    """
    if OPAQUE in os.listxattr(upper):
        return
    copy = _Copy(os.fstat(project).st_dev)
    try:
        for path, directories, names, source in os.fwalk(".", dir_fd=project, onerror=_raise):
            target = open_directory(upper, path)
            try:
                found = [each for each in (*directories, *names) if copy.has(each, source, target)]
            finally:
                os.close(target)
            directories[:] = set(directories).intersection(found)
        os.setxattr(upper, OPAQUE, b"y")
    except OSError as error:
        words = f"{error.filename or 'the copy'}: {error.strerror}"
        raise WorkspaceError(f"cannot copy the project for a review: {words}", _HINT) from None


def _raise(error: OSError) -> None:
    raise error


class _Copy:
    def __init__(self, device: int) -> None:
        self._device = device
        self._bytes = self._entries = 0

    def has(self, name: str, source: int, target: int) -> bool:
        """Copy an entry that the target lacks; return whether it is a directory there then."""
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        try:
            there = os.stat(name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            return self._make(name, source, target, status)
        if stat.S_ISCHR(there.st_mode) and there.st_rdev == 0:
            os.unlink(name, dir_fd=target)
        return stat.S_ISDIR(there.st_mode) and stat.S_ISDIR(status.st_mode)

    def _check(self) -> None:
        if self._entries > _MOST_ENTRIES or self._bytes > _MOST_BYTES:
            words = f"{_MOST_ENTRIES:,} entries, or {_MOST_BYTES >> 30} GiB"
            raise WorkspaceError(f"the project has more than {words}: no copy is made of it", _HINT)

    def _make(self, name: str, source: int, target: int, status: os.stat_result) -> bool:
        self._entries += 1
        self._check()
        if stat.S_ISDIR(status.st_mode):
            if status.st_dev == self._device:
                os.mkdir(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=target)
            return status.st_dev == self._device
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(status.st_mode):
            self._copy_file(name, source, target, status)
        return False

    def _copy_file(self, name: str, source: int, target: int, status: os.stat_result) -> None:
        with (
            open(os.open(name, _READ, dir_fd=source), "rb") as read,
            open(os.open(name, _WRITE, stat.S_IMODE(status.st_mode), dir_fd=target), "wb") as made,
        ):
            try:
                fcntl.ioctl(made, _FICLONE, read.fileno())
            except OSError:  # another file system, or one without shared blocks
                while data := read.read(_CHUNK):
                    self._bytes += len(data)
                    self._check()
                    made.write(data)
            made.flush()
            os.utime(made.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))

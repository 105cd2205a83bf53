"""`OwnedDirectory`: a directory inside another, for files that are of no use once their process ended.

Its process holds a lock on it (flock(2)), which the kernel releases when that process ends, however it
ends.  So others tell whether what they find is still of use.
"""

import contextlib
import fcntl
import os
import secrets

_SUFFIX = ".owned"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
            self._opened = os.open(self.name, _OPEN, dir_fd=parent)
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
    """Return the names, from `parent`, of what is in such a directory; remove it if its owner has
    ended.  A name that is of no such directory is returned itself.  Raises OSError."""
    if not name.endswith(_SUFFIX):
        return [name]
    opened = os.open(name, _OPEN, dir_fd=parent)
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

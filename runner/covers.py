"""`Covers`: checks, before every call, that denied paths stay hidden from a launcher's cells."""

import mmap
import os
import threading

from .messages import Cover, Views, decode


class Covers:
    """A launcher's root, the covers in it, and the host directories that it shows entry by entry.

    A cover vanishes when its mount point is replaced or removed from outside (rename(2)).  Safe
    from many threads.
    """

    def __init__(self, root: int, memory: int) -> None:
        """Take over two descriptors: the launcher's root directory, and a memfd with `Views`."""
        self._root = root
        self._lock = threading.Lock()
        try:
            with mmap.mmap(memory, 0, access=mmap.ACCESS_READ) as content:
                self._views: Views = decode(bytes(content), Views)
        finally:
            os.close(memory)

    def uncovered(self) -> str:
        """Return the first denied path whose cover is gone; "" if all covers are there."""
        with self._lock:
            if self._root < 0:
                return ""
            for each in self._views.covers:
                if not self._lies(each):
                    return each.path
        return ""

    def is_current(self) -> bool:
        """Return whether every cover is there and every directory shown entry by entry is
        unchanged."""
        if self.uncovered():
            return False
        for each in self._views.snapshots:
            try:
                status = os.stat(each.path, follow_symlinks=False)
            except OSError:
                return False
            now = status.st_dev, status.st_ino, status.st_mtime_ns
            if now != (each.device, each.inode, each.changed_at_ns):
                return False
        return True

    def _lies(self, cover: Cover) -> bool:
        try:
            status = os.stat(cover.path[1:], dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (cover.device, cover.inode)

    def close(self) -> None:
        """Release the launcher's root; may be called twice."""
        with self._lock:
            root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

"""What keeps denied paths from a launcher's cells, looked at before every call."""

import mmap
import os
import threading

from .messages import Cover, Views, decode


class Covers:
    """The root of a launcher, the covers in it, and the host directories that it shows entry by entry.

    A cover is gone once what it lies on was replaced or removed from outside (rename(2)).  Safe from
    many threads.
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
        """Return the first denied path whose cover is gone; empty if all are there."""
        with self._lock:
            if self._root < 0:
                return ""
            for each in self._views.covers:
                if not self._lies(each):
                    return each.path
        return ""

    def is_current(self) -> bool:
        """Tell whether every cover is there, and what is shown entry by entry is unchanged."""
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
        """Forget the launcher's root; twice is fine."""
        with self._lock:
            root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

"""Files that the host lays out for all cells of a supervisor: they read them, and never write.

They are in a memory filesystem of each launcher's own, of which cells see a read-only mount and we hold
the only other one.  No disk has them, and they go with the launcher, whatever ends it or us.
"""

import contextlib
import os
import threading
from collections.abc import Mapping, MutableMapping

PLACE = "/tools"  # in cells
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Shelf:
    """The same files for every launcher that is admitted; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, str] = {}
        self._laid: dict[int, dict[str, str]] = {}  # what stands in each launcher's directory

    def admit(self, directory: int) -> None:
        """Lay out the files in a launcher's `directory` too, which is ours to close from now on."""
        with self._lock:
            self._laid[directory] = {}
            _change(directory, self._laid[directory], self._files)

    def dismiss(self, directory: int) -> None:
        """Forget a launcher that is gone; twice is fine."""
        with self._lock:
            if self._laid.pop(directory, None) is not None:
                os.close(directory)

    def lay(self, files: Mapping[str, str]) -> None:
        """Have these files, and no others, on the shelf: path -> text.

        A cell that runs sees each file as it was or as it is, never a part of it.  What cannot be laid,
        because it is too much, is an OSError, and in nobody's way when something else is.
        """
        with self._lock:
            self._files = dict(files)
            for directory, laid in self._laid.items():
                _change(directory, laid, self._files)


def _change(directory: int, laid: MutableMapping[str, str], after: Mapping[str, str]) -> None:
    """Have `after` in a directory, where `laid` is, and is kept what is there, however far it comes."""
    folders = _folders(laid)
    for path in laid.keys() - after.keys():
        os.unlink(path, dir_fd=directory)
        del laid[path]
    for folder in sorted(folders - _folders(after), reverse=True):
        os.rmdir(folder, dir_fd=directory)
    for folder in sorted(_folders(after) - folders):
        with contextlib.suppress(FileExistsError):  # of a change that failed
            os.mkdir(folder, dir_fd=directory)
        os.chmod(folder, 0o755, dir_fd=directory)  # noqa: S103 - cells are another user's
    for path, text in after.items():
        if laid.get(path) != text:
            _write(directory, path, text)
            laid[path] = text


def _folders(files: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    for path in files:
        while (path := os.path.dirname(path)) and path not in found:
            found.add(path)
    return found


def _write(directory: int, path: str, text: str) -> None:
    new = f"{path}~"
    with contextlib.suppress(FileNotFoundError):  # of a write that failed
        os.unlink(new, dir_fd=directory)
    try:
        with open(os.open(new, _NEW, 0o644, dir_fd=directory), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=directory)  # it would take the room of what fits
        raise
    os.rename(new, path, src_dir_fd=directory, dst_dir_fd=directory)

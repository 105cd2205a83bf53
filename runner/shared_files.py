"""`SharedFiles`: files that the host provides, read-only, to all cells of a supervisor.

Each launcher has a memory filesystem for each place of such files.  Cells see it through a read-only
mount; the supervisor holds the only writable one.  The files are never on disk, and
end with the launcher.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping

PLACE = "/tools"  # place of tool stubs in cells
SKILLS = "/skills"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Content = str | bytes


class SharedFiles:
    """The same files for every admitted launcher; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, Content] = {}
        self._written: dict[int, dict[str, Content]] = {}  # files by the launcher's directory
        self._followers: list[Callable[[Mapping[str, Content]], None]] = []

    def attach(self, directory: int) -> None:
        """Write the files into a launcher's `directory` too; this closes that descriptor."""
        with self._lock:
            self._written[directory] = {}
            _change(directory, self._written[directory], self._files)

    def detach(self, directory: int) -> None:
        """Forget a launcher that has ended; may be called twice."""
        with self._lock:
            if self._written.pop(directory, None) is not None:
                os.close(directory)

    def follow(self, change: Callable[[Mapping[str, Content]], None]) -> Mapping[str, Content]:
        """Return the files; `change` is called with each later version, and may raise OSError."""
        with self._lock:
            self._followers.append(change)
            return self._files

    def unfollow(self, change: Callable[[Mapping[str, Content]], None]) -> None:
        """Call `change` no more; may be called twice."""
        with self._lock, contextlib.suppress(ValueError):
            self._followers.remove(change)

    def replace(self, files: Mapping[str, Content]) -> None:
        """Replace the files by `files`: path -> content.

        A running cell sees each file in its old or its new version, never partly written.  Raises
        OSError if the files do not fit; a later call with other files can succeed.
        """
        with self._lock:
            self._files = dict(files)
            for directory, written in self._written.items():
                _change(directory, written, self._files)
            for change in self._followers:
                change(self._files)


def _change(
    directory: int, written: MutableMapping[str, Content], after: Mapping[str, Content]
) -> None:
    """Change a directory from `written` to `after`; `written` follows each step, even if one fails."""
    folders = _folders(written)
    for path in written.keys() - after.keys():
        os.unlink(path, dir_fd=directory)
        del written[path]
    for folder in sorted(folders - _folders(after), reverse=True):
        os.rmdir(folder, dir_fd=directory)
    for folder in sorted(_folders(after) - folders):
        with contextlib.suppress(FileExistsError):  # left by a failed change
            os.mkdir(folder, dir_fd=directory)
        os.chmod(folder, 0o755, dir_fd=directory)  # noqa: S103 - cells are another user's
    for path, content in after.items():
        if written.get(path) != content:
            _write(directory, path, content)
            written[path] = content


def _folders(files: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in files:
        while (path := os.path.dirname(path)) and path not in found:
            found.add(path)
    return found


def _write(directory: int, path: str, content: Content) -> None:
    new = f"{path}~"
    with contextlib.suppress(FileNotFoundError):  # left by a failed write
        os.unlink(new, dir_fd=directory)
    try:
        with open(os.open(new, _NEW, 0o644, dir_fd=directory), "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=directory)  # a partial file would take space from files that fit
        raise
    os.rename(new, path, src_dir_fd=directory, dst_dir_fd=directory)

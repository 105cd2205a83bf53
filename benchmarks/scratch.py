"""Scratch directories of benchmarks: a lock tells a live one from one whose process was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "cellwright-bench-"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory that is removed at the end.

    If this process is killed before that, `remove_stale` of a later benchmark removes it.
    """
    with contextlib.ExitStack() as stack:
        made = _made(stack)
        while made is None:  # another process locked or removed it before we locked it
            made = _made(stack)
        yield made


def remove_stale() -> list[str]:
    """Remove this user's scratch directories that no process has locked; return their names."""
    found = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    return [path.name for path in found if _is_removed(path)]


def _made(stack: contextlib.ExitStack) -> Path | None:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
    try:
        descriptor = _opened(path)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return None
    return path if path.exists() else None


def _is_removed(path: Path) -> bool:
    with (
        contextlib.ExitStack() as stack,
        contextlib.suppress(OSError),
    ):  # it is locked, or no directory
        descriptor = _opened(path)
        stack.callback(os.close, descriptor)
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            return True
    return False


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

"""Bundles: the directory of a container, with its configuration, its root and the runtime's notes.

The root holds nothing but places for mounts, and links.  It is of this user alone, and goes when the
launcher in the container has ended.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...policies.errors import LaunchError
from ..cgroups.tree import start_time

_PREFIX = "cellwright-oci"
_CONFIG, _ROOT, _STATE, _RUNTIME = "config.json", "root", "state", "runtime"
_PID = "pid"


class Bundle:
    """The directory of one container, which is named as its directory is."""

    def __init__(self, links: Iterable[tuple[str, str]], program: str) -> None:
        """Make a bundle for a runtime's `program`, with `links` in its root; raises LaunchError."""
        pid = os.getpid()
        try:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}-{pid}-{start_time(pid)}-")  # 0700
        except OSError as error:
            raise LaunchError(f"cannot make a bundle: {error.filename}: {error.strerror}") from None
        try:
            Path(self.path, _RUNTIME).write_text(program)
            os.mkdir(self.state, 0o700)
            _make_root(Path(self.path, _ROOT), links)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot write {error.filename}: {error.strerror}") from None
            raise

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def state(self) -> str:
        """The directory of the runtime's own notes."""
        return os.path.join(self.path, _STATE)

    @property
    def pid_file(self) -> str:
        return os.path.join(self.path, _PID)

    def write_config(self, config: dict[str, Any]) -> None:
        self.add(_CONFIG, json.dumps(config).encode())

    def add(self, name: str, data: bytes) -> str:
        """Write a file beside the root, or below it, and return its path."""
        path = Path(self.path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def add_texts(self, texts: Mapping[str, str]) -> None:
        """Write files of the root."""
        for place, text in texts.items():
            self.add(_ROOT + place, text.encode())

    def remove(self) -> None:
        """Remove it; a mount in it, which no runtime leaves, is never entered."""
        remove_bundle(Path(self.path))


def remove_bundle(path: Path) -> bool:
    """Remove the directory of a bundle unless something is mounted in it; return whether it is gone."""
    inside = f" {path}/"
    if inside in Path("/proc/self/mountinfo").read_text():
        return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def leftover_bundles() -> Iterator[tuple[Path, str]]:
    """Yield the bundles of this user whose process has ended, each with its runtime's program."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*-*"):
        pid, start, *_ = path.name.removeprefix(f"{_PREFIX}-").split("-")
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o170777 != 0o040700:
                continue
            if pid.isdecimal() and start_time(int(pid)) != start:
                yield path, _program_of(path)


def _program_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return (path / _RUNTIME).read_text()
    return ""


def state_of(path: Path) -> str:
    """Return the directory of a runtime's notes in the bundle at `path`."""
    return str(path / _STATE)


def _make_root(root: Path, links: Iterable[tuple[str, str]]) -> None:
    root.mkdir(0o755)
    for name in ("proc", "dev", "tmp"):
        (root / name).mkdir(0o755)
    for path, target in links:
        link = root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(target)

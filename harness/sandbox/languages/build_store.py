"""`BuildStore`: builds of compilers, kept on disk for later calls and other processes.

Cells see the directory of all builds, read-only, and cannot list it: a build can only be opened by its
name, which is a keyed hash, and a program gets only the name of its own build.
"""

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from ....policies.errors import LaunchError
from ....policies.policy import MIB
from ....runner.requests.result import CompileResult
from ...user_data import cache_directory, make_private_directory, replace_file

MOST_BYTES = 2048 * MIB
_SWEEP_EVERY = 64  # builds: a sweep looks at all
_KEPT_AFTER_SWEEP = 0.75  # share of the bytes kept by a sweep
_ENTRY_BYTES = 4096  # on disk, of an entry, and of each file beside its content
_SHOWN_MODE = 0o311  # cells may have this user's id: they look up names, and list none
_FILE_MODE, _FOLDER_MODE = 0o555, 0o755


class BuildEntry(msgspec.Struct, frozen=True):
    """A build, with how its compiler ended; one that failed has no files."""

    compiled: CompileResult
    size_bytes: int


class BuildStore:
    """The builds below `directory`, at most `most_bytes`: those that were not used for the longest time
    are removed.  Safe from many threads and processes."""

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        """Open the store, and make it if it is missing; raises LaunchError."""
        make_private_directory(directory, LaunchError)
        self._entries, shown = directory / "entries", directory / "shown"
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept = 0
        self.shown = str(shown)
        try:
            self._entries.mkdir(0o700, exist_ok=True)
            shown.mkdir(exist_ok=True)
            shown.chmod(_SHOWN_MODE)
            os.chmod(directory, 0o711)  # noqa: S103 - to look up what is shown, as another user
            self._key = _secret(directory / "key")
        except OSError as error:
            raise LaunchError(f"cannot write {error.filename}: {error.strerror}") from None

    def name_of(self, *parts: bytes) -> str:
        """Return the name of the build that is made of these: no one without the key can tell it."""
        named = blake2b(key=self._key, digest_size=32)
        for part in parts:
            named.update(len(part).to_bytes(8, "little") + part)
        return named.hexdigest()

    def find(self, name: str) -> CompileResult | None:
        """Return how the compiler ended that made the build, and note its use; None if it is gone."""
        entry = self._entries / name
        try:
            found = msgspec.msgpack.decode(entry.read_bytes(), type=BuildEntry)
            os.utime(entry)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):
            return None
        if found.compiled.ok and not os.path.isdir(os.path.join(self.shown, name)):
            return None
        return found.compiled

    def keep(self, name: str, compiled: CompileResult, files: Mapping[str, bytes]) -> None:
        """Keep a build under its name; raises LaunchError if it cannot be written."""
        place = os.path.join(self.shown, name)
        new = os.path.join(self.shown, secrets.token_hex(32))
        size = (
            _ENTRY_BYTES * (1 + len(files)) + sum(map(len, files.values())) + len(compiled.output)
        )
        try:
            if compiled.ok and not os.path.isdir(place):
                _write(new, files)
                os.rename(new, place)
            entry = msgspec.msgpack.encode(BuildEntry(compiled, size))
            replace_file(self._entries / name, entry)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            if not os.path.isdir(place):  # another process was not quicker
                raise LaunchError(f"cannot keep a build: {error.strerror}") from None
        with self._lock:
            self._kept += 1
            is_due = self._kept % _SWEEP_EVERY == 1 or size > self._most_bytes // _SWEEP_EVERY
        if is_due:
            self._sweep(name)

    def _sweep(self, newest: str) -> None:
        """Remove the builds that were not used for the longest time, if all are too large."""
        found: list[tuple[float, int, Path]] = []
        for entry in self._entries.iterdir():
            try:
                size = msgspec.msgpack.decode(entry.read_bytes(), type=BuildEntry).size_bytes
                found.append((entry.stat().st_mtime, size, entry))
            except (OSError, UnicodeDecodeError, msgspec.DecodeError):
                continue
        total = sum(size for _, size, _ in found)
        if total <= self._most_bytes:
            return
        for _, size, entry in sorted(found):
            if total <= self._most_bytes * _KEPT_AFTER_SWEEP or entry.name == newest:
                return
            entry.unlink(missing_ok=True)
            shutil.rmtree(os.path.join(self.shown, entry.name), ignore_errors=True)
            total -= size


def build_store_directory() -> Path:
    """Return the directory of the user's builds."""
    return cache_directory() / "builds"


def _secret(file: Path) -> bytes:
    """Return the key of the names; the first process draws it."""
    if not file.exists():
        new = file.with_name(secrets.token_hex(16))
        new.touch(0o600)
        new.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(new, file)
        new.unlink()
    return file.read_bytes()


def _write(directory: str, files: Mapping[str, bytes]) -> None:
    os.mkdir(directory, _FOLDER_MODE)
    os.chmod(directory, _FOLDER_MODE)
    for path, content in files.items():
        target = os.path.join(directory, path)
        parent = os.path.dirname(target)
        os.makedirs(parent, exist_ok=True)
        os.chmod(parent, _FOLDER_MODE)
        with open(target, "xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), _FILE_MODE)

"""`PackageStore`: sets of packages for Python cells, in a directory of the user.

    locks/KEY.toml          the wheels that requirements were resolved to: pylock.toml (PEP 751)
    wheels/SHA256-PYTHON/   the files of one opened wheel
    sets/ID/                one flat tree of the files of all wheels of a lock, by hard links
    new/                    what is being made; renamed when it is whole

Everything appears by a rename and is never changed afterwards.  So whatever is there is whole.  A
process that dies, or a full disk, leaves at most something below new/, which the next process removes.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....policies.closing import Closing
from ....policies.errors import PackageError, PackageNotFound, PolicyError
from ....policies.policy import Packages, Policy, check_limit, named_layers
from ...user_data import state_directory
from ..pythons import find_python
from .lock import (
    Lock,
    Wheel,
    check_requirements,
    normalised,
    pylock_text,
    read_pylock,
    read_requirements,
    require_extra,
)
from .package_sources import WheelSource
from .resolution import fetch, resolve
from .store_directory import (
    DIRECTORY_MODE,
    NO_DEADLINE,
    Deadline,
    Files,
    StoreDirectory,
    add_font_list,
    is_sealed,
    open_wheel,
)

Requirements = Iterable[str] | str | os.PathLike[str]


class PackageSet(msgspec.Struct, frozen=True):
    """A set that was built.

    id: its name in the store, from the digests of its wheels
    lock: its wheels
    directory: the tree that cells import from
    size_bytes: of its files
    used: when a sandbox last opened it, seconds since the epoch
    """

    id: str
    lock: Lock
    directory: str
    size_bytes: int
    used: float


class _Manifest(msgspec.Struct, frozen=True):
    lock: Lock
    files: Files


class _Paths(NamedTuple):
    top: Path
    site: Path
    manifest: Path


def _paths(top: Path) -> _Paths:
    return _Paths(top, top / "site", top / "manifest.json")


class PackageStore:
    """The sets of packages in one directory; a missing one is made, with access for its owner alone.

    `directory`: default `cellwright/packages` in $XDG_STATE_HOME, else in ~/.local/state. `find_links`:
    a folder of wheels. `index`: False, and nothing but that folder is asked. `index_url`: the index to
    ask; default that of pip's configuration. `max_bytes`: of the files of one set; default
    `packages.max_bytes` of the policy, 8 GiB without one.
    `allow`: the packages that a set may have, dependencies included; default any. `optional_layers`:
    layers that the cells which open wheels may lack, as in a policy. `python`: the Python that sets are
    for, as for Sandbox; default the one that runs this process.

    Safe from many threads and processes.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *,
        find_links: str | os.PathLike[str] | None = None, index: bool = True,
        index_url: str | None = None, max_bytes: int | None = None,
        allow: Iterable[str] | None = None, optional_layers: Sequence[str] = (),
        python: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        if max_bytes is not None:
            check_limit("packages.max_bytes", max_bytes, whole=True)
        if find_links is not None and not os.path.isdir(find_links):
            raise PolicyError(f"find_links: must be a directory, got {os.fspath(find_links)!r}")
        if not index and find_links is None:
            raise PolicyError("find_links: required with index=False")
        require_extra()
        self._folder = StoreDirectory(
            Path(directory or state_directory() / "packages").absolute()  # pip runs elsewhere
        )
        self.source = WheelSource(
            None if find_links is None else os.path.abspath(find_links), bool(index), index_url
        )
        self.max_bytes = max_bytes
        self.allow = None if allow is None else frozenset(map(normalised, allow))
        self.optional_layers = named_layers("optional_layers", optional_layers)
        self.interpreter = find_python(python)
        self.python = self.interpreter.tag

    @property
    def directory(self) -> Path:
        return self._folder.path

    @property
    def _most_bytes(self) -> int:
        return self.max_bytes or Packages().max_bytes

    def limited_to(self, policy: Policy) -> "PackageStore":
        """Return this store with the limits of `policy` beside its own."""
        packages, allow = policy.packages, self.allow
        if packages.allow:
            named = frozenset(map(normalised, packages.allow))
            allow = named if allow is None else allow & named
        most = min(self.max_bytes or packages.max_bytes, packages.max_bytes)
        return PackageStore(
            self.directory, find_links=self.source.find_links, index=self.source.index,
            index_url=self.source.index_url, max_bytes=most, allow=allow,
            optional_layers=(*self.optional_layers, *policy.optional_layers),
            python=None if self.interpreter.is_ours else self.interpreter.path,
        )  # fmt: skip

    def lock(
        self, requirements: Requirements, *, again: bool = False, deadline: Deadline = NO_DEADLINE
    ) -> Lock:
        """Return the wheels of `requirements`: a list, or the path of a pylock.toml or of a
        requirements file.

        The resolution of a list is kept; `again` resolves it anew. Raises PackageError and PolicyError.
        """
        if isinstance(requirements, os.PathLike):
            return self._allowed(self._locked_by_file(Path(requirements), deadline))
        wanted = check_requirements("packages", requirements)
        self._folder.make()
        kept = self.directory / "locks" / f"{self._key(wanted)}.toml"
        if not again and kept.exists():
            return self._allowed(read_pylock(kept, self.interpreter))
        lock = self._allowed(resolve(wanted, self.source, self.interpreter, deadline))
        self._folder.write(kept, pylock_text(lock))
        return lock

    def build(self, lock: Lock, *, deadline: Deadline = NO_DEADLINE) -> PackageSet:
        """Return the set of `lock`, made if it is missing; raises PackageError."""
        if lock.python != self.python:
            raise PackageError(f"the lock is for {lock.python}, the store for {self.python}")
        self._allowed(lock)
        self._folder.make()
        # Not the lock of the set, which sandboxes that use the set hold.
        with self._folder.locked(f"build-{lock.id}", deadline=deadline):
            if (found := self._found(lock.id)) is None:
                with self._folder.locked(f"set-{lock.id}", deadline=deadline):
                    self._set_aside(lock.id)
                self._assemble(lock, deadline)
                found = self._found(lock.id)
        if found is None:
            raise PackageError(f"the set {lock.id} was removed while it was made")
        self._allowed(found.lock)  # the set may have been made under other limits
        if found.size_bytes > self._most_bytes:
            raise _too_large(found.size_bytes, self._most_bytes)
        return found

    def open(self, requirements: Requirements, *, deadline: Deadline = NO_DEADLINE) -> "OpenSet":
        """Return the set of `requirements`, which stays in the store until it is closed.

        It is made if it is missing, and checked.  Raises PackageError, also if that takes until after
        the deadline; PolicyError.
        """
        wanted = self.lock(requirements, deadline=deadline)
        while True:
            made = self.build(wanted, deadline=deadline)
            held = self._folder.lock(f"set-{made.id}", fcntl.LOCK_SH, deadline)
            try:
                if (
                    self._found(made.id) is not None
                ):  # otherwise another process has just removed it
                    self.check(made.id)
                    os.utime(self._set(made.id).top)
                    return OpenSet(made, held)
            except BaseException:
                os.close(held)
                raise
            os.close(held)

    def list(self) -> tuple[PackageSet, ...]:
        """Return the sets, the last used first."""
        folder = self.directory / "sets"
        names = os.listdir(folder) if folder.is_dir() else []
        found = [each for each in map(self._found, names) if each]
        return tuple(sorted(found, key=lambda each: each.used, reverse=True))

    def get(self, id: str) -> PackageSet:
        """Return the set whose id begins with `id`; raises PackageNotFound for none or several."""
        found = [each for each in self.list() if id and each.id.startswith(id)]
        if len(found) != 1:
            how_many = "several sets begin" if found else "no set begins"
            raise PackageNotFound(f"{how_many} with {id!r}", "see `cellwright env list`")
        return found[0]

    def check(self, id: str, *, contents: bool = False) -> None:
        """Raise PackageError unless the files of a set are unchanged.

        Names, sizes, modes and times are compared; with `contents` the digests too.
        """
        paths = self._set(id)
        if path := _changed(paths.site, self._manifest(paths).files, contents):
            raise PackageError(
                f"set {id}: {path} was changed after the set was made",
                f"remove the set, which is then built again: cellwright env remove {id}",
            )

    def remove(self, id: str) -> None:
        """Remove a set; raises PackageError if it is missing or a sandbox has it open."""
        found = self.get(id)
        if not self._removed(found.id):
            raise PackageError(f"set {found.id} is in use", "close the sandboxes that have it open")
        self._remove_wheels()

    def prune(
        self, *, max_age_seconds: float | None = None, max_bytes: float | None = None
    ) -> tuple[str, ...]:
        """Remove sets that were not used for `max_age_seconds`, then the longest unused ones until the
        rest has at most `max_bytes`; return their ids.  Sets in use stay."""
        for name, limit in (("max_age_seconds", max_age_seconds), ("max_bytes", max_bytes)):
            if limit is not None:
                check_limit(name, limit)
        self._folder.make()
        removed, kept = [], 0
        for each in self.list():
            old = max_age_seconds is not None and time.time() - each.used >= max_age_seconds
            too_many = max_bytes is not None and kept + each.size_bytes > max_bytes
            if (old or too_many) and self._removed(each.id):
                removed.append(each.id)
            else:
                kept += each.size_bytes
        self._remove_wheels()
        return tuple(removed)

    def _locked_by_file(self, path: Path, deadline: Deadline) -> Lock:
        if path.suffix == ".toml":
            return read_pylock(path, self.interpreter)
        return resolve(read_requirements(path), self.source, self.interpreter, deadline)

    def _key(self, wanted: tuple[str, ...]) -> str:
        said = msgspec.json.encode((self.python, wanted, self.source))
        return hashlib.sha256(said).hexdigest()[:32]

    def _allowed(self, lock: Lock) -> Lock:
        refused = [
            each.name
            for each in lock.wheels
            if self.allow is not None and each.name not in self.allow
        ]
        if refused:
            raise PackageError(
                f"packages.allow: must have {refused[0]}",
                "it is a required package, or a dependency of one",
            )
        return lock

    def _assemble(self, lock: Lock, deadline: Deadline) -> None:
        """Make the set of `lock`: open the wheels that were not, then link all files into one tree."""
        with self._folder.locked("wheels", fcntl.LOCK_SH), self._folder.new() as folder:
            missing = [each for each in lock.wheels if not self._wheel(each).manifest.exists()]
            most, opened = self._most_bytes, 0
            fetched = (
                fetch(missing, self.source, folder, deadline, self.interpreter, most)
                if missing
                else {}
            )
            for wheel, path in fetched.items():
                opened += self._open(wheel, path, folder, deadline)
                path.unlink()
                if opened > most:  # before the next takes room on the disk
                    raise _too_large(opened, most)
            made = _paths(Path(folder, "set"))
            files = self._linked(lock, made.site)
            files |= add_font_list(made.site, self.optional_layers, deadline)
            made.manifest.write_bytes(msgspec.json.encode(_Manifest(lock, files)))
            self._folder.publish(made.top, self._set(lock.id).top)

    def _open(self, wheel: Wheel, path: Path, folder: str, deadline: Deadline) -> int:
        """Unpack a wheel into the store; return the bytes of its files."""
        made = _paths(Path(folder, wheel.sha256))
        made.site.mkdir(0o755, parents=True)
        files = open_wheel(
            wheel,
            path,
            made.site,
            self._most_bytes,
            self.optional_layers,
            deadline,
            self.interpreter,
        )
        manifest = _Manifest(Lock(self.python, (wheel,)), files)
        made.manifest.write_bytes(msgspec.json.encode(manifest))
        self._folder.publish(made.top, self._wheel(wheel).top)
        return sum(size for size, _ in files.values())

    def _linked(self, lock: Lock, site: Path) -> Files:
        found: Files = {}
        folded: dict[str, str] = {}
        site.mkdir(0o755, parents=True)
        for wheel in lock.wheels:
            opened = self._wheel(wheel)
            manifest = self._manifest(opened)
            if (was := manifest.lock.wheels[0]).name != wheel.name or was.version != wheel.version:
                raise PackageError(
                    f"the lock names {wheel.name}, but its wheel contains {was.name}"
                )
            if changed := _changed(opened.site, manifest.files, contents=True):
                raise PackageError(
                    f"{wheel.name}: {changed} was changed after the wheel was opened",
                    "remove all sets that have it (cellwright env show); it is then unpacked again",
                )
            for path, (size, digest) in manifest.files.items():
                other = folded.setdefault(path.casefold(), path)
                try:
                    if found.get(path, (size, digest)) != (size, digest) or other != path:
                        raise FileExistsError
                    if path not in found:
                        (site / path).parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
                        os.link(opened.site / path, site / path)
                # NotADirectoryError: a file of one wheel is a directory of another
                except (FileExistsError, NotADirectoryError):
                    raise PackageError(
                        f"{wheel.name} and another package both have {path!r}"
                    ) from None
                found[path] = size, digest
        for folder, _, _ in os.walk(site):
            os.chmod(folder, DIRECTORY_MODE)  # whatever the umask is; the user of a cell reads it
        if (total := sum(size for size, _ in found.values())) > self._most_bytes:
            raise _too_large(total, self._most_bytes)
        return found

    def _found(self, id: str) -> PackageSet | None:
        paths = self._set(id)
        try:
            used = paths.top.stat().st_mtime
            manifest = self._manifest(paths)
        except (OSError, PackageError):
            return None
        total = sum(size for size, _ in manifest.files.values())
        return PackageSet(id, manifest.lock, str(paths.site), total, used)

    def _manifest(self, paths: _Paths) -> _Manifest:
        try:
            return msgspec.json.decode(paths.manifest.read_bytes(), type=_Manifest)
        except (OSError, ValueError) as error:
            raise PackageError(
                f"{paths.manifest}: {error}", "remove it, and build it again"
            ) from None

    def _set(self, id: str) -> _Paths:
        return _paths(self.directory / "sets" / id)

    def _wheel(self, wheel: Wheel) -> _Paths:
        return _paths(self.directory / "wheels" / f"{wheel.sha256}-{self.python}")

    def _removed(self, id: str) -> bool:
        try:
            with self._folder.locked(f"set-{id}", fcntl.LOCK_EX | fcntl.LOCK_NB):
                self._set_aside(id)
        except BlockingIOError:
            return False
        return True

    def _set_aside(self, id: str) -> None:
        with self._folder.new() as folder, contextlib.suppress(FileNotFoundError):
            os.rename(self._set(id).top, Path(folder, "set"))

    def _remove_wheels(self) -> None:
        """Remove the opened wheels that no set has, unless a set is being made of some."""
        folder = self.directory / "wheels"
        with (
            contextlib.suppress(BlockingIOError),
            self._folder.locked("wheels", fcntl.LOCK_EX | fcntl.LOCK_NB), self._folder.new() as new,
        ):  # fmt: skip
            used = {
                self._wheel(wheel).top.name for each in self.list() for wheel in each.lock.wheels
            }
            for name in set(os.listdir(folder) if folder.is_dir() else ()) - used:
                os.rename(folder / name, Path(new, name))


class OpenSet(Closing):
    """A set that stays in the store until it is closed."""

    def __init__(self, made: PackageSet, lock: int) -> None:
        self.made = made
        self._lock = lock

    def close(self) -> None:
        """Let it be removed; closing twice is fine."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{path}/")
                else:
                    yield path, entry.stat(follow_symlinks=False)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _too_large(size: int, most: int) -> PackageError:
    hint = "raise packages.max_bytes of the policy, and max_bytes of a PackageStore that has one"
    return PackageError(f"the set has {size} bytes, at most {most}", hint)


def _changed(site: Path, expected: Files, contents: bool) -> str:
    files = dict(expected)
    for path, found in _walk(site):
        size, digest = files.pop(path, (-1, ""))
        if not is_sealed(found, size) or (contents and _digest(site / path) != digest):
            return path
    return min(files, default="")

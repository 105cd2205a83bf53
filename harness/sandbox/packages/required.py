"""`PreloadLearner`: has a launcher preload the modules that programs of a set of packages import.

Modules of a set of packages, and those that a program imports, by its source.

A program's imports are hints from untrusted text: only names of modules in the set are used.

The packages that a sandbox asks for, in its policy and in its arguments.

`HotSets`: a launcher with warm cells for each set of packages that calls of one sandbox name.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

import msgspec

from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import Policy, check_policy
from ....runner.concurrency import NEVER, begin_thread
from ....runner.supervisor import Supervisor
from ..lending_cache import LendingCache
from .lock import check_requirements
from .package_store import OpenSet, PackageStore, Requirements
from .store_directory import Deadline

_MOST_MODULES = 64
_MOST_PROGRAMS = 200  # programs that are looked at
_MOST_LAUNCHERS = 8  # launchers that are started to learn


class PreloadLearner:
    """Reads the first programs of a set, and starts launchers that preload their imports.

    A launcher that cannot import all of it ends the learning: the launcher before it stays.
    Safe from many threads.
    """

    def __init__(self, supervisor: Supervisor, directory: str) -> None:
        """`directory`: the set of packages, whose modules alone are learnt."""
        self._supervisor = supervisor
        self._directory = directory
        self._lock = threading.Lock()
        self._modules: dict[str, None] = {}
        self._programs = _MOST_PROGRAMS
        self._launchers = _MOST_LAUNCHERS
        self._thread: threading.Thread | None = None

    def look_at(self, code: str | bytes) -> None:
        """Learn from a program that has completed; a new launcher starts in the background."""
        if self._programs <= 0 or self._launchers <= 0:
            return
        text = code if isinstance(code, str) else code.decode("utf-8", "replace")
        named = {each for each in imports_of(text) if each not in self._modules}
        new = sorted(each for each in named if has_module(self._directory, each))
        with self._lock:
            self._programs -= 1
            room = max(0, _MOST_MODULES - len(self._modules))
            self._modules |= dict.fromkeys(new[:room])
            if new[:room] and self._thread is None and self._launchers > 0:
                self._thread = begin_thread("cellwright-preload", self._preload)

    def _preload(self) -> None:
        """Start launchers until one has imported all that was learnt."""
        while True:
            with self._lock:
                modules = tuple(self._modules)
                self._launchers -= 1
            try:
                self._supervisor.preload(modules)
            except CellwrightError:  # the launcher cannot import them, or was closed
                with self._lock:
                    self._launchers = 0
            with self._lock:
                if self._launchers <= 0 or len(self._modules) == len(modules):
                    self._thread = None
                    return

    def settle(self) -> None:
        """Wait until the launcher that has been started, if any, has taken over."""
        if thread := self._thread:
            thread.join()

    def close(self) -> None:
        """Start no more launchers, and wait until none is on its way."""
        with self._lock:
            self._launchers = 0
        self.settle()


_MOST_CHARACTERS = 64 * 1024  # characters read of a program
_MOST_NAMES = 200  # module names of one program
_SUFFIXES = (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]{1,200})[ \t]+import\b[ \t(]{0,99}([\w \t,]{0,1000})"
    r"|import[ \t]+([\w. \t,]{1,1000}))",
    re.MULTILINE | re.ASCII,
)


def imports_of(code: str) -> Iterator[str]:
    """Yield the names of modules, and of possible modules, in a program's import statements."""
    for count, found in enumerate(_IMPORT.finditer(code[:_MOST_CHARACTERS])):
        if count == _MOST_NAMES:
            return
        package, names, modules = found.groups()
        if package:
            yield package
            yield from (f"{package}.{name}" for name in _first_words(names))
        else:
            yield from _first_words(modules)


def _first_words(listed: str) -> Iterator[str]:
    """Yield the imported names of "a as b, c"."""
    for each in listed.split(","):
        if words := each.split():
            yield words[0]


def has_module(directory: str, name: str) -> bool:
    """Tell whether a set in `directory` has the module; a package without code does not count."""
    parts = name.split(".")
    if not all(part.isidentifier() and part != "__main__" for part in parts):
        return False
    place = Path(directory, *parts)
    return any(
        place.with_name(f"{place.name}{suffix}").is_file()
        or (place / f"__init__{suffix}").is_file()
        for suffix in _SUFFIXES
    )


_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)


def open_required(
    policy: Policy, packages: Requirements | None, store: PackageStore | None
) -> tuple[Policy, OpenSet | None]:
    """Return `policy` with the directory of the packages that it and `packages` ask for, and the set.

    Raises PolicyError and PackageError.
    """
    named = policy.packages.require
    wanted: Requirements = named
    if isinstance(packages, os.PathLike):
        if named:
            raise PolicyError(
                "packages: a file cannot be combined with packages.require of the policy",
                "name all packages in one of the two",
            )
        wanted = packages
    elif packages is not None:
        policy = requiring(policy, listed("packages", packages))
        wanted = policy.packages.require
    if not isinstance(wanted, os.PathLike) and not wanted:
        return policy, None
    opened = (store or PackageStore()).limited_to(policy).open(wanted)
    try:
        return importing_from(policy, opened.made.directory), opened
    except BaseException:
        opened.close()
        raise


def listed(name: str, packages: object) -> list[str]:
    """Return a requirement or several as a list; raises PolicyError, which begins with `name`, for
    anything else."""
    if isinstance(packages, str):
        return [packages]
    if isinstance(packages, Iterable) and not isinstance(packages, bytes):
        return list(packages)
    kind = type(packages).__name__
    raise PolicyError(
        f"{name}: must be a list of requirements, or the path of a lock file, got {kind}"
    )


def requiring(policy: Policy, given: list[str]) -> Policy:
    """Return `policy` with `given` among the packages that it requires; raises PolicyError."""
    require = check_requirements("packages", [*policy.packages.require, *given])
    packages = msgspec.structs.replace(policy.packages, require=require)
    return msgspec.structs.replace(policy, packages=packages)


def importing_from(policy: Policy, directory: str) -> Policy:
    """Return `policy` with `directory` in `python.path`, and with those modules of it to be preloaded
    that `packages.preload` names."""
    path = tuple(dict.fromkeys((*policy.python.path, directory)))
    ahead = [name for name in policy.packages.preload if has_module(directory, name)]
    preload = tuple(dict.fromkeys((*policy.python.preload, *ahead)))
    python = msgspec.structs.replace(policy.python, path=path, preload=preload)
    return check_policy(msgspec.structs.replace(policy, python=python))


def site_of_environment(directory: str | os.PathLike[str], version: tuple[int, int]) -> str:
    """Return the packages of the virtual environment in `directory`, which is of Python `version`.

    Raises PolicyError if it is not a Python, or has another version: packages with shared libraries
    work in one version only.
    """
    top = Path(directory).resolve()
    try:
        found = _VERSION.search((top / "pyvenv.cfg").read_text())
    except (OSError, ValueError):
        found = None
    wanted = f"{version[0]}.{version[1]}"
    if found is None:
        raise PolicyError(f"venv: must be a virtual environment, got {os.fspath(directory)!r}")
    if found[1] != wanted:
        raise PolicyError(
            f"venv: must have Python {wanted}, as cells do, got {found[1]}",
            f"make one with python{wanted} -m venv",
        )
    return str(top / "lib" / f"python{wanted}" / "site-packages")


_REMEMBERED = 1000  # lists of packages
MakeSupervisor = Callable[[Policy], Supervisor]


class HotSet:
    """An open set of packages and the launcher of its cells."""

    def __init__(self, opened: OpenSet, policy: Policy, make: MakeSupervisor) -> None:
        directory = opened.made.directory
        self.supervisor = make(importing_from(policy, directory))
        self._opened = opened
        self._learner = (
            PreloadLearner(self.supervisor, directory) if policy.packages.learn_preload else None
        )

    def look_at(self, code: str | bytes) -> None:
        """Learn from a program of this set that has completed, if the policy says so."""
        if self._learner:
            self._learner.look_at(code)

    def settle(self) -> None:
        """Wait until learnt modules are preloaded and the pool is full."""
        if self._learner:
            self._learner.settle()
        self.supervisor.settle()

    def close(self) -> None:
        """End the launcher and every cell of it, then let the set be removed."""
        try:
            if self._learner:
                self._learner.close()
            self.supervisor.close()
        finally:
            self._opened.close()


class HotSets:
    """Lends the launchers of sets of packages, and ends the least recently used one when those
    together have more than `most_bytes` of memory.

    `policy`: of the sandbox, before its own packages are in it.  `packages`: its own, which every set
    has too.  `make` returns the supervisor of a policy.  Safe from many threads.
    """

    def __init__(
        self, policy: Policy, packages: Requirements | None, store: PackageStore | None,
        most_bytes: int, make: MakeSupervisor,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._packages = packages
        self._store = store
        self._make = make
        self._known: dict[tuple[str, ...], str] = {}  # list of packages -> id of its set
        self._cache = LendingCache[HotSet](
            most_bytes, "the sandbox", lambda each: each.supervisor.memory_bytes()
        )

    def __iter__(self) -> Iterator[HotSet]:
        """Yield the launchers that are kept, the least recently used first."""
        return iter(self._cache)

    @contextlib.contextmanager
    def lend(
        self, packages: Iterable[str], seconds: float, cancel: int = NEVER
    ) -> Iterator[HotSet]:
        """Lend the launcher of a set that has `packages`; a missing set is built, which may take
        `seconds`.

        Raises PolicyError for invalid packages, PackageError if they cannot be had in time, and what
        Supervisor raises.
        """
        wanted = tuple(listed("packages", packages))
        deadline = Deadline(seconds, cancel)
        opened: OpenSet | None = None
        if (id := self._known.get(wanted, "")) not in self._cache:
            opened = self._open(wanted, deadline)
            id = opened.made.id
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[wanted] = id

        def make() -> HotSet:
            nonlocal opened
            taken, opened = opened or self._open(wanted, deadline), None
            try:
                return HotSet(taken, self._policy, self._make)
            except BaseException:
                taken.close()
                raise

        try:
            with self._cache.lend(id, make) as hot:
                yield hot
        finally:
            if opened:  # another thread has already done it
                opened.close()

    def _open(self, packages: Iterable[str], deadline: Deadline) -> OpenSet:
        if isinstance(self._packages, os.PathLike):
            raise PolicyError(
                "packages: a call cannot add packages to the lock file of its sandbox",
                "make another sandbox for them",
            )
        own = () if self._packages is None else listed("packages", self._packages)
        wanted = requiring(self._policy, [*own, *packages]).packages.require
        if self._store is None:
            self._store = PackageStore()
        return self._store.limited_to(self._policy).open(wanted, deadline=deadline)

    def settle(self) -> None:
        """Wait until the pool of each launcher is full."""
        self._cache.settle()

    def close(self) -> None:
        """End every launcher, with its cells."""
        self._cache.close()

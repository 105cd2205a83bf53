"""The files that the interpreter needs: its standard library and shared libraries, nothing else."""

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import LaunchError
from ...policies.languages import OWN_PROGRAMS
from .answer_cache import cached

if TYPE_CHECKING:
    from pathlib import Path

_DISTRIBUTION_LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")  # with a merged /usr
_DATA = ("/usr/share/zoneinfo", "/etc/ld.so.cache")  # zoneinfo(3), ld.so(8)
_PROBE_SECONDS = 60


class Runtime(msgspec.Struct, frozen=True):
    """The part of the host that a cell's interpreter sees, read-only, at the same paths."""

    executable: str
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    programs: tuple[str, ...]  # shown if a cell may start other programs, such as a compiler

    @property
    def loader(self) -> str:
        """The dynamic loader (ld.so(8))."""
        return next(path for path in self.files if os.path.basename(path).startswith("ld-"))

    def names(self) -> tuple[tuple[str, str], ...]:
        """Return links by which other programs of a cell start this interpreter."""
        names = ("python", "python3", os.path.basename(self.executable))
        return tuple((f"{OWN_PROGRAMS}/{name}", self.executable) for name in dict.fromkeys(names))


def find_runtime(executable: str) -> Runtime:
    """Return the files that `executable` needs; the dynamic loader is asked once, then the cache.

    Raises LaunchError if it is missing or cannot load its own standard library.
    """
    try:
        stat = os.stat(executable)
    except OSError as error:
        message = f"cannot use {executable} as interpreter: {error.strerror}"
        raise LaunchError(message, "install it or name another one") from None
    key = f"runtime 4 {executable} {stat.st_mtime_ns} {stat.st_size} {sys.version}"
    return cached(key, Runtime, lambda: _ask(executable))


def _ask(executable: str) -> Runtime:
    from pathlib import Path  # slow to import, and the answer is cached

    stdlib, *libraries = _stdlib_and_libraries(executable)
    outside = [path for path in libraries if not path.startswith(stdlib + "/")]
    links = [(path, os.readlink(path)) for path in _DISTRIBUTION_LINKS if os.path.islink(path)]
    for path in outside:
        links += sonames(Path(path)) + loader_links(Path(path))
    data = [path for path in _DATA if os.path.exists(path)]
    hidden = [path for path in (f"{stdlib}/site-packages",) if os.path.isdir(path)]
    # The path of the dynamic loader is fixed in every program: /lib64 on some architectures, a link
    # in /lib on others.
    places = ["/usr/lib64"]
    if not stdlib.startswith("/usr/lib/"):  # else system_files.toml has its headers
        prefix = stdlib.removesuffix(f"/lib/{os.path.basename(stdlib)}")
        places.append(f"{prefix}/include/{os.path.basename(stdlib)}")
    programs = (executable, *filter(os.path.isdir, places))
    return Runtime(executable, (stdlib, *outside, *data), tuple(links), tuple(hidden), programs)


def _stdlib_and_libraries(executable: str) -> list[str]:
    import subprocess  # needed only without a cached answer

    script = os.path.join(os.path.dirname(__file__), "loaded_libraries.py")
    done = subprocess.run(  # run without an environment, which would change what the loader finds
        [executable, "-I", "-S", script],
        env={}, cwd="/", capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"{executable} cannot load its standard library: {done.stderr[-500:]}")
    return done.stdout.splitlines()


def sonames(library: "Path") -> list[tuple[str, str]]:
    """Return the links to `library` in its directory, whose names programs use."""
    return [
        (str(link), library.name)
        for link in library.parent.glob(library.name.partition(".so")[0] + "*")
        if link.is_symlink() and link.resolve() == library
    ]


def loader_links(
    library: "Path", places: tuple[str, ...] = ("/usr/lib", "/lib")
) -> list[tuple[str, str]]:
    """Return the links in `places` that lead to `library` if it is the dynamic loader."""
    from pathlib import Path

    if not library.name.startswith("ld-"):
        return []
    links = (Path(place, library.name) for place in places if not os.path.islink(place))
    return [
        (str(link), str(library))
        for link in links
        if link.is_symlink() and link.resolve() == library
    ]

"""The files of a launcher in a container: its packages, and the libraries that these load."""

import os
from pathlib import Path

import msgspec

from ...policies.errors import LaunchError
from ..host.cache import cached
from ..host.runtime import sonames
from .config import Mount

PACKAGES = "/.cellwright/packages"
_FACE = "cellwright"
_FOLDERS = ("policies", "runner")  # what a launcher imports; links in a checkout
_ASK_SECONDS = 60
_SCRIPT = (
    "import sys;sys.path[:0]=sys.argv[1:];"
    "sys.modules['typing_extensions']=sys.modules['_uuid']=None;"
    "from cellwright.runner.launcher import main\n"
    "print(*{line.split(None,5)[5].strip() for line in open('/proc/self/maps') if '.so' in line},"
    "sep='\\n')"
)


class LauncherLibraries(msgspec.Struct, frozen=True):
    """The shared libraries that a launcher loads, and the links by which it finds them."""

    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def package_mounts(paths: list[str]) -> tuple[Mount, ...]:
    """Return where a launcher in a container finds the packages that it finds in `paths` outside."""
    found: list[Mount] = []
    for path in paths:
        for entry in sorted(Path(path).glob("*")):
            if not _is_wanted(entry):
                continue
            found.append(Mount(f"{PACKAGES}/{entry.name}", str(entry.resolve())))
            if entry.name == _FACE:
                found += [
                    Mount(f"{PACKAGES}/{folder}", str((entry / folder).resolve()))
                    for folder in _FOLDERS if (entry / folder).is_symlink()
                ]  # fmt: skip
    first = {
        mount.place: mount for mount in reversed(found)
    }  # as sys.path has it: the first counts
    return tuple(first.values())


def _is_wanted(entry: Path) -> bool:
    name = entry.name.partition(".")[0]
    if entry.is_dir():
        return name in (_FACE, "msgspec", "prctl")
    return name in ("prctl", "_prctl") and entry.suffix in (".py", ".so")


def launcher_libraries(executable: str, paths: list[str]) -> LauncherLibraries:
    """Return what `executable` loads as a launcher; asked once, then the cache.

    Raises LaunchError if it cannot be a launcher.
    """
    stats = [os.stat(path) for path in (executable, *paths)]
    identity = [(each.st_mtime_ns, each.st_ino) for each in stats]
    key = f"launcher libraries 1 {executable} {paths} {identity}"
    return cached(key, LauncherLibraries, lambda: _ask(executable, paths))


def _ask(executable: str, paths: list[str]) -> LauncherLibraries:
    import subprocess  # only if nothing is cached

    done = subprocess.run(
        [executable, "-I", "-S", "-c", _SCRIPT, *paths],
        env={}, cwd="/", capture_output=True, text=True, timeout=_ASK_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"{executable} cannot be a launcher: {done.stderr[-500:]}")
    files = sorted(path for path in done.stdout.splitlines() if not path.startswith(tuple(paths)))
    links = [link for path in files for link in sonames(Path(path))]
    return LauncherLibraries(tuple(files), tuple(links))

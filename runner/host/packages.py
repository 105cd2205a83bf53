"""Shared libraries of the host that Python packages need beyond the interpreter's own.

A wheel brings most of its libraries, but not, for example, libstdc++.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from ...policies.errors import LaunchError
from ...policies.policy import lies_in
from .cache import cached
from .elf import needs_of
from .runtime import Runtime, sonames

_FOUND = re.compile(r"=> (/\S+) \(")
_SECONDS = 60
_NAME = re.compile(r"[\w.+-]{1,255}", re.ASCII)
_MOST_WANTED = 400  # names; all are in one variable, which has at most 128 KiB (MAX_ARG_STRLEN)
_SITE = re.compile(r"/lib/python3\.\d+/site-packages/?$")  # of an environment
_UP_TO_LIB = ("..", "..")
_NONE: Mapping[str, str] = MappingProxyType({})
FONT_LISTS = "__fonts__"  # in a directory of packages: what each cell sees in its /tmp
_FONT_LIST = re.compile(r"fontlist-v[\w.]{1,50}\.json", re.ASCII)  # of matplotlib
_MPLCONFIGDIR = "/tmp"  # noqa: S108 - of cells, as the plan has it


class _Needed(msgspec.Struct, frozen=True):
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def with_packages(runtime: Runtime, directories: tuple[str, ...]) -> Runtime:
    """Return `runtime` with the libraries of the packages in `directories`, and without hidden
    ones.

    Raises LaunchError if a directory does not exist.
    """
    if not directories:
        return runtime
    files, links = runtime.files, runtime.links
    for directory in directories:
        needed = _needed(directory, runtime)
        files, links = (*files, *needed.files), (*links, *needed.links, *_font_lists(directory))
    return Runtime(
        executable=runtime.executable,
        files=tuple(dict.fromkeys(files)),
        links=tuple(dict.fromkeys(links)),
        hidden=tuple(path for path in runtime.hidden if not lies_in(path, directories)),
        programs=runtime.programs,
    )


def is_font_list(name: str) -> bool:
    """Tell whether a file of that name is matplotlib's list of fonts."""
    return _FONT_LIST.fullmatch(name) is not None


def _font_lists(directory: str) -> tuple[tuple[str, str], ...]:
    """Return where matplotlib looks for its list of fonts, and where the packages have it."""
    place = os.path.join(directory, FONT_LISTS)
    names = os.listdir(place) if os.path.isdir(place) else []
    return tuple(
        (os.path.join(_MPLCONFIGDIR, name), os.path.join(place, name))
        for name in names if is_font_list(name)
    )  # fmt: skip


def _needed(directory: str, runtime: Runtime) -> _Needed:
    try:
        stat = os.stat(os.path.join(directory, "."))
    except OSError as error:
        raise LaunchError(f"python.path: {directory}: {error.strerror}") from None
    key = f"packages 2 {directory} {stat.st_mtime_ns} {runtime}"  # installing changes the directory
    return cached(key, _Needed, lambda: _ask(directory, runtime))


def _ask(directory: str, runtime: Runtime) -> _Needed:
    """Read what libraries below `directory` need; the loader never sees them: they may be hostile."""
    names = _wanted(directory)
    shown = (directory, *runtime.files)
    found = [path for path in names.values() if path]
    found += _found_by(runtime, sorted(name for name, path in names.items() if not path))
    new = [path for path in dict.fromkeys(found) if not lies_in(path, shown)]
    return _Needed(tuple(new), tuple(link for path in new for link in sonames(Path(path))))


def _wanted(directory: str) -> dict[str, str]:
    """Return the names of the libraries that are needed from elsewhere; for those in the `lib` of an
    environment that has `directory` as its site-packages, with their paths."""
    inside = [path for path in Path(directory).rglob("*.so*") if path.is_file()]
    own = {path.name for path in inside}
    lib = os.path.realpath(os.path.join(directory, *_UP_TO_LIB)) if _SITE.search(directory) else ""
    waiting, wanted = [*inside], dict[str, str]()
    while waiting:
        needs = needs_of(waiting.pop())
        for name in {name for name in needs.names if _NAME.fullmatch(name)} - own - wanted.keys():
            path = os.path.realpath(os.path.join(lib, name)) if lib in needs.directories else ""
            wanted[name] = path if path and lies_in(path, (lib,)) and os.path.isfile(path) else ""
            if wanted[name]:
                waiting.append(Path(path))
        if len(wanted) > _MOST_WANTED:
            raise LaunchError(
                f"python.path: the libraries in {directory} need more than {_MOST_WANTED} others"
            )
    return wanted


def _found_by(runtime: Runtime, names: list[str]) -> list[str]:
    """Ask the dynamic loader where libraries of these names are, and what those need."""
    found = _listed_by(runtime.loader, runtime.executable, {"LD_PRELOAD": ":".join(names)})
    return sorted({os.path.realpath(path) for path in found}) if names else []


def libraries_of(programs: list[str], runtime: Runtime) -> list[str]:
    """Return the files that the dynamic loader would map for `programs`, without the programs."""
    needed = {path for program in programs for path in _listed_by(runtime.loader, program)}
    return sorted({os.path.realpath(path) for path in needed})


def _listed_by(loader: str, library: str, variables: Mapping[str, str] = _NONE) -> list[str]:
    """Ask the dynamic loader what `library` needs, without executing its code (ld.so(8))."""
    done = subprocess.run(
        [loader, "--list", library],
        env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    return _FOUND.findall(done.stdout)

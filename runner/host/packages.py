"""Shared libraries of the host that Python packages need beyond the interpreter's own.

A wheel brings most of its libraries, but not, for example, libstdc++.
"""

import os
import re
import subprocess
from pathlib import Path

import msgspec

from ...policies.errors import LaunchError
from ...policies.policy import lies_in
from .cache import cached
from .runtime import Runtime, sonames

_FOUND = re.compile(r"=> (/\S+) \(")
_SECONDS = 60


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
        files, links = (*files, *needed.files), (*links, *needed.links)
    return Runtime(
        executable=runtime.executable,
        files=tuple(dict.fromkeys(files)),
        links=tuple(dict.fromkeys(links)),
        hidden=tuple(path for path in runtime.hidden if not lies_in(path, directories)),
        programs=runtime.programs,
    )


def _needed(directory: str, runtime: Runtime) -> _Needed:
    try:
        stat = os.stat(os.path.join(directory, "."))
    except OSError as error:
        raise LaunchError(f"python.path: {directory}: {error.strerror}") from None
    key = f"packages 1 {directory} {stat.st_mtime_ns} {runtime}"  # installing changes the directory
    return cached(key, _Needed, lambda: _ask(directory, runtime))


def _ask(directory: str, runtime: Runtime) -> _Needed:
    libraries = [str(path) for path in Path(directory).rglob("*.so*") if path.is_file()]
    shown = (directory, *runtime.files)
    found = [path for path in libraries_of(libraries, runtime) if not lies_in(path, shown)]
    return _Needed(tuple(found), tuple(link for path in found for link in sonames(Path(path))))


def libraries_of(programs: list[str], runtime: Runtime) -> list[str]:
    """Return the files that the dynamic loader would map for `programs`, without the programs."""
    needed = {path for program in programs for path in _listed_by(runtime.loader, program)}
    return sorted({os.path.realpath(path) for path in needed})


def _listed_by(loader: str, library: str) -> list[str]:
    """Ask the dynamic loader what `library` needs, without executing its code (ld.so(8))."""
    done = subprocess.run(
        [loader, "--list", library],
        env={}, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    return _FOUND.findall(done.stdout)

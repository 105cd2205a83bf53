"""Pythons of the host for cells: found by version, each with the packages that its launchers import.

A launcher imports msgspec, whose extension module fits one version of Python, and prctl where it is
installed beside it.  A Python of another version than this one has them in its own environment, or in a
directory of the user for that version.
"""

import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import LaunchError, PolicyError, Unavailable
from ...runner.launching.spawn import Spawned, interpreter
from .checks import check_host_path

if TYPE_CHECKING:
    from pathlib import Path

_OLDEST = (3, 11)
_VERSION = re.compile(r"(?:python:?)?(\d{1,2})\.(\d{1,3})(?:\.(\d{1,3}))?", re.ASCII)
_SECONDS = 60
_NEEDED = "msgspec"
_ASK = """
import importlib.util, json, os, sys
tag = sys.implementation.cache_tag
sys.path.insert(0, os.path.join(sys.argv[1], tag))
spec = importlib.util.find_spec(sys.argv[2])
found = [os.path.dirname(os.path.dirname(spec.origin)) if spec and spec.origin else None]
path = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
print(json.dumps({"path": path, "version": list(sys.version_info[:3]), "tag": tag, "packages": found}))
"""


class HostPython(msgspec.Struct, frozen=True):
    """An interpreter: its `path` outside any virtual environment, its `version`, the `tag` of its
    bytecode, such as cpython-312, and the directories of the `packages` of its launchers.

    Without packages its launchers use those of this process, whose version is the same.
    """

    path: str
    version: tuple[int, int, int]
    tag: str
    packages: tuple[str | None, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether it has the version of this process."""
        return self.version[:2] == sys.version_info[:2]

    def spawn(self, *, has_fixed_addresses: bool = False) -> Spawned:
        """Start a launcher; raises LaunchError."""
        packages = [each for each in self.packages if each]
        return Spawned(self.path, packages=packages, has_fixed_addresses=has_fixed_addresses)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} ({self.path})"


def this_python() -> HostPython:
    """Return the interpreter that runs this process."""
    major, minor, micro = sys.version_info[:3]
    return HostPython(interpreter(), (major, minor, micro), str(sys.implementation.cache_tag))


def find_python(
    wanted: str | os.PathLike[str] | None, runtime: str | os.PathLike[str] | None = None
) -> HostPython:
    """Return the Python that `python=` or `runtime=` names: a version such as "3.12", or a path.

    Raises PolicyError for invalid values; LaunchError if the host has no such Python, or it lacks a
    package that a launcher imports.
    """
    if runtime is not None:
        if wanted is not None:
            raise PolicyError("runtime: cannot be combined with python")
        wanted = _version_of_runtime(runtime)
    if wanted is None:
        return this_python()
    if not isinstance(wanted, str | os.PathLike):
        raise PolicyError(f"python: must be a version such as '3.12', or a path, got {wanted!r}")
    path = check_host_path("python", wanted)
    version = _VERSION.fullmatch(path)
    if version is None:
        return _usable(_asked(path), path)
    numbers = tuple(int(each) for each in version.groups() if each)
    if numbers[:2] < _OLDEST:
        raise PolicyError(f"python: must be 3.11 or newer, got {path!r}")
    return _of_version(numbers)


def _version_of_runtime(runtime: object) -> str | None:
    name, colon, version = runtime.partition(":") if isinstance(runtime, str) else ("", "", "")
    if name != "python" or (colon and not _VERSION.fullmatch(version)):
        raise PolicyError(
            f"runtime: must be such as 'python:3.12', got {runtime!r}",
            "for another language pass language= to execute",
        )
    return version or None


def _of_version(numbers: tuple[int, ...]) -> HostPython:
    """Return the first Python of a version, if possible one that has the packages."""
    ours = this_python()
    if ours.version[: len(numbers)] == numbers:
        return ours
    found = [
        each for path in _candidates(f"python{numbers[0]}.{numbers[1]}", numbers)
        if (each := _answer_of(path)) and each.version[: len(numbers)] == numbers
    ]  # fmt: skip
    if not found:
        there = "; ".join(dict.fromkeys(map(str, pythons())))
        raise Unavailable(
            f"python: there is no Python {'.'.join(map(str, numbers))} on PATH, in pyenv or in uv",
            f"this host has {there}; or name the path of another one",
        )
    return _usable(next((each for each in found if None not in each.packages), found[0]))


def pythons() -> tuple[HostPython, ...]:
    """Return the Pythons of this host that cells could have, each once; asks each of them."""
    found = {this_python().path: this_python()}
    for minor in range(_OLDEST[1], _OLDEST[1] + 10):
        for path in _candidates(f"python3.{minor}", (3, minor)):
            if answer := _answer_of(path):
                found.setdefault(answer.path, answer)
    return tuple(found.values())


def _candidates(name: str, numbers: tuple[int, ...]) -> Iterator[str]:
    import glob  # not needed for a sandbox of this Python

    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(data, "uv", "python")
    start = f"{numbers[0]}.{numbers[1]}"
    patterns = (
        *(
            os.path.join(glob.escape(each), name)
            for each in os.get_exec_path()
            if os.path.isabs(each)
        ),
        os.path.join(glob.escape(pyenv), "versions", f"{start}*", "bin", name),
        os.path.join(glob.escape(uv), f"cpython-{start}*", "bin", name),
    )
    seen = set()
    for path in (path for pattern in patterns for path in sorted(glob.glob(pattern))):
        if (real := os.path.realpath(path)) not in seen and os.access(path, os.X_OK):
            seen.add(real)
            yield path


def _answer_of(path: str) -> HostPython | None:
    """Return an interpreter's own description; None for a file that is not an interpreter, such as
    pyenv's shim of a version that is not selected."""
    try:
        return _asked(path)
    except LaunchError:
        return None


def _asked(path: str) -> HostPython:
    import subprocess  # not needed for a sandbox of this Python

    command = [path, "-I", "-c", _ASK, str(_place()), _NEEDED]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"cannot use {path} as interpreter: it does not answer") from None
    except OSError as error:
        raise Unavailable(
            f"python: cannot start {path}: {error.strerror}",
            "name a version such as 3.12, or the path of an interpreter",
        ) from None
    try:
        return msgspec.json.decode(done.stdout, type=HostPython)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise Unavailable(f"cannot use {path} as interpreter: {said or 'no answer'}") from None


def _usable(python: HostPython, given: str | None = None) -> HostPython:
    """Return `python` if launchers can run in it; raises LaunchError.

    One of our version keeps the path that was `given`, and has our packages.
    """
    if python.is_ours:
        return msgspec.structs.replace(python, path=given or python.path, packages=())
    if python.version[:2] < _OLDEST:
        raise Unavailable(f"python: must be 3.11 or newer, got {python}")
    if None in python.packages:
        raise LaunchError(
            f"Python {python} lacks {_NEEDED}, which starts its cells",
            f"{python.path} -m pip install --target {_place() / python.tag} {_NEEDED}",
        )
    return python


def _place() -> "Path":
    """Return the directory with the packages of launchers, a directory for each tag."""
    from ..user_data import state_directory  # not needed for a sandbox of this Python

    return state_directory() / "pythons"

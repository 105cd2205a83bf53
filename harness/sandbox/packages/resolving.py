"""Locks of requirements, by pip or uv on the host, and wheels, which pip fetches.

Building a source distribution would run its code.  `--only-binary :all:` does not prevent that for one
that is named by its address, in the metadata of a wheel too, so the process of pip cannot start others:
every build needs one.
"""

import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....policies.errors import PackageError
from ....policies.extras import how_to_install
from ....runner.living import directory_prefix
from ..pythons import HostPython, this_python
from .deadline import NO_DEADLINE, Deadline
from .lock import Lock, Wheel, lock_of, normalised, wheel_of
from .pip_settings import settings_of_pip
from .sources import ONLY_WHEELS, WheelSource
from .tool_process import MEMORY_BYTES, run_tool
from .uv import can_resolve, find_uv, lock_by_uv

_PIECE = 1 << 20
_MOST_TOLD = 2000  # characters of what pip said
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # of a requirement that was checked
_MOST_REPORT = 256 << 20  # bytes; it has the metadata of every wheel
# What pip prints of an error: one line, or a form with the reason in the line that an arrow begins.
_ERRORS = re.compile(r"^(?:ERROR: |OSError: |╰─> )(?!Exception:$)(.+)$", re.MULTILINE)
# Runs pip in a process that cannot start another one, and has no network if the first argument is "0".
_CONFINED_PIP = """
import resource, runpy, sys

starts = {
    "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
}
connects = {"socket.connect", "socket.getaddrinfo", "socket.sendmsg", "socket.sendto"}
refused = starts if sys.argv.pop(1) == "1" else starts | connects

def refuse(event, arguments):
    if event in refused:
        raise PermissionError(1, f"pip may use only wheels, and is refused {event}")

memory, hard = int(sys.argv.pop(1)), resource.getrlimit(resource.RLIMIT_AS)[1]
if hard == resource.RLIM_INFINITY or hard > memory:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
sys.path += filter(None, [sys.argv.pop(1)])  # of a Python that may have no pip
sys.addaudithook(refuse)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}


class _Download(msgspec.Struct):
    url: str
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Install(msgspec.Struct):
    download_info: _Download
    is_direct: bool = False
    requested: bool = False


class _Report(msgspec.Struct):
    """pip's installation report, version 1."""

    version: str
    install: list[_Install]


def resolve(
    lines: Sequence[str], source: WheelSource, python: HostPython, deadline: Deadline = NO_DEADLINE
) -> Lock:
    """Return the wheels that meet the lines of a requirements file: by uv if it is installed, else by
    pip, which finds the same.

    Raises PackageError if there are none, neither can be run, or it takes until after the deadline.
    """
    with tempfile.TemporaryDirectory(prefix=directory_prefix()) as folder:  # for `cellwright gc`
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{line}\n" for line in lines))
        source.check()
        if (uv := find_uv()) and can_resolve(lines, source):
            return lock_by_uv(uv, wanted, source, python, deadline)
        _pip(
            ["install", "--dry-run", "--ignore-installed", "--report", str(report), "-r", str(wanted)],
            source, folder, deadline, python,
        )  # fmt: skip
        try:
            if report.stat().st_size > _MOST_REPORT:
                raise PackageError(f"pip's report is longer than {_MOST_REPORT} bytes")
            found = msgspec.json.decode(report.read_bytes(), type=_Report)
        except (OSError, ValueError) as error:
            raise PackageError(f"pip's report cannot be read: {error}") from None
    if direct := [each.download_info.url for each in found.install if each.is_direct]:
        raise PackageError(
            f"a package requires an address: {direct[0]}", "packages may require only names"
        )
    names = {normalised(each[0]) for each in map(_NAME.match, lines) if each}
    wheels = []
    for each in found.install:
        hashes = each.download_info.archive_info.hashes
        wheels.append(wheel := wheel_of(each.download_info.url, hashes.get("sha256", "")))
        if each.requested and wheel.name not in names:
            raise PackageError(
                f"pip's settings require {wheel.name} as well",
                "remove `requirement` from the settings of pip (pip config debug)",
            )
    return lock_of(python.tag, wheels)


def fetch(
    wheels: Sequence[Wheel],
    source: WheelSource,
    folder: str,
    deadline: Deadline = NO_DEADLINE,
    python: HostPython | None = None,
) -> dict[Wheel, Path]:
    """Download `wheels` into `folder` and return their files, whose digests are those of the lock.

    Raises PackageError.
    """
    wanted = Path(folder, "wanted.txt")
    source.check()
    settings = settings_of_pip(os.environ)
    wanted.write_text(
        "".join(
            f"{source.address_of(each, settings)} --hash=sha256:{each.sha256}\n" for each in wheels
        )
    )
    command = ["download", "--no-deps", "--dest", folder, "-r", str(wanted)]
    _pip(command, source, folder, deadline, python or this_python())
    found = {}
    for each in wheels:
        path = Path(folder, each.filename)
        try:
            digest = _digest(path)
        except OSError as error:
            raise PackageError(f"{each.filename} was not fetched: {error.strerror}") from None
        if digest != each.sha256:
            raise PackageError(f"{each.filename} is not the wheel that was locked")
        path.chmod(0o444)  # the user of a cell reads it
        found[each] = path
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _pip(
    arguments: Sequence[str], source: WheelSource, folder: str, deadline: Deadline,
    python: HostPython,
) -> None:  # fmt: skip
    """Run pip in `python`, so that it chooses wheels for that version: its own pip, else ours."""
    executable, ours = sys.executable, ""
    if not python.is_ours and (spec := importlib.util.find_spec("pip")) and spec.origin:
        executable, ours = python.path, os.path.dirname(os.path.dirname(spec.origin))
    command = [
        executable, "-Ic", _CONFINED_PIP, str(int(source.index)), str(MEMORY_BYTES), ours,
        arguments[0], "--quiet", "--no-input", "--no-color",
        "--disable-pip-version-check", *source.options(), *arguments[1:],
    ]  # fmt: skip
    code, said = run_tool("pip", command, source.variables(os.environ), folder, deadline)
    if code == 0:
        return
    if "No module named pip" in said:
        raise PackageError(f"{executable} has no pip", how_to_install("packages"))
    errors = _ERRORS.findall(said)
    errors = errors or said.strip().splitlines()[-1:] or ["failed without a word"]
    raise PackageError(f"pip: {errors[-1][:_MOST_TOLD]}", _hint(said))


def _hint(said: str) -> str:
    if "No matching distribution" in said:
        return ONLY_WHEELS
    return ""

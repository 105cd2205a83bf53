"""Opens a fetched wheel in a cell, and copies what comes of it to the host.

A wheel is hostile: nothing of it is parsed, unpacked or compiled outside the cell.  The cell writes to
its own /workspace, whose size the kernel limits; the host copies regular files from there after
everything in the cell has been killed.
"""

import hashlib
import json
import os
import re
import stat
from importlib import resources
from pathlib import Path

from ....policies.errors import CellwrightError, PackageError
from ....policies.policy import MIB, Filesystem, Limits, Policy, Processes
from ....runner.request import Request
from ....runner.result import SandboxResult
from ....runner.settings import PoolSettings
from ....runner.supervisor import Supervisor
from ....runner.workspace import list_all_files, read_file
from ..pythons import HostPython, this_python
from .deadline import NO_DEADLINE, Deadline
from .lock import Wheel

_SECONDS = 900.0
_MEMORY_BESIDE_FILES = 768 * MIB  # the compiler takes 500 MiB for the largest modules (measured)
_MOST_FILES = 20_000  # as many as the host lists of a workspace
_FILE_MODE, DIRECTORY_MODE = 0o444, 0o755
_SEALED_NS = 315_532_800 * 10**9  # 1980-01-01, the first day of zip: any other time is a change

_IMPORT = re.compile(r"^from \.zip_archive import .*\n", re.MULTILINE)  # the names are there then

Files = dict[str, tuple[int, str]]  # path: size, sha256


def open_wheel(
    wheel: Wheel, path: Path, target: Path, most_bytes: int,
    optional_layers: tuple[str, ...] = (), deadline: Deadline = NO_DEADLINE,
    python: HostPython | None = None,
) -> Files:  # fmt: skip
    """Unpack the wheel at `path` into the new directory `target`, and return its files.

    Raises PackageError if the wheel is refused, larger than `most_bytes` unpacked, or not opened by
    the deadline.
    """
    files: Files = {}

    def keep(workspace: int) -> None:
        files.update(_copy(workspace, target, most_bytes))

    given = [str(path), "/workspace", wheel.name, wheel.version, [most_bytes, _MOST_FILES // 2]]
    request = Request(
        code=f"{_program()}\nunpack(*{json.dumps(given)})",
        limits=_limits(most_bytes, deadline.left(_SECONDS)),
    )
    supervisor = Supervisor(
        _policy(path, request.limits, optional_layers),
        (python or this_python()).spawn(),
        settings=PoolSettings(size=0),
    )
    try:
        result = supervisor.execute(request, cancel=deadline.cancel, keep=keep)
    except CellwrightError as error:
        raise PackageError(f"{wheel.filename}: {error}") from error
    finally:
        supervisor.close()
    if result.reason in ("wall_time", "cancelled"):
        deadline.left()  # the cell had no longer than that
    _check(wheel, result)
    return files


def _program() -> str:
    """Return the text of both modules that run in the cell, as one."""
    folder = resources.files(__package__)
    reader, opener = (folder.joinpath(name).read_text() for name in ("zip_archive.py", "unpack.py"))
    return reader + _IMPORT.sub("", opener)


def _policy(wheel: Path, limits: Limits, optional_layers: tuple[str, ...]) -> Policy:
    return Policy(
        name="open a wheel",
        filesystem=Filesystem(read=(str(wheel),)),
        processes=Processes(threads=False),
        limits=limits,
        optional_layers=optional_layers,
    )


def _limits(most_bytes: int, seconds: float) -> Limits:
    return Limits(
        wall_seconds=seconds, cpu_seconds=_SECONDS, memory_bytes=most_bytes + _MEMORY_BESIDE_FILES,
        workspace_bytes=most_bytes, workspace_inodes=2 * _MOST_FILES, processes=1,
    )  # fmt: skip


def _check(wheel: Wheel, result: SandboxResult) -> None:
    """Raise PackageError unless the program in the cell opened the wheel."""
    if not result.ok:
        raise PackageError(f"{wheel.filename}: cannot be opened: {result.error or result.reason}")
    told = result.value if isinstance(result.value, dict) else {}
    if "left_out" not in told:
        why = told.get("refused", "cannot be unpacked: malformed answer from its cell")
        hint = "check where it comes from, or build it anew (pip wheel) where you trust its source"
        if str(why).startswith("unpacks to"):
            hint = "raise max_bytes ([packages] of the policy)"
        raise PackageError(f"{wheel.filename} {str(why)[:500]}", hint)


def _copy(workspace: int, target: Path, most_bytes: int) -> Files:
    """Copy the regular files of a cell at rest, sealed: read-only and of one time.

    Raises PackageError if they claim more than `most_bytes`, which the cell could write: some are
    sparse, or one file has many names.
    """
    found: Files = {}
    listing = list_all_files(workspace)
    if (total := sum(seen.size_bytes for seen in listing.values())) > most_bytes:
        raise PackageError(f"unpacks to {total} bytes, at most {most_bytes}")
    for path, seen in listing.items():
        copy = target / path
        copy.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        found[path] = write_sealed(copy, read_file(workspace, path, seen.size_bytes))
    return found


def write_sealed(path: Path, content: bytes) -> tuple[int, str]:
    """Write a file that is read-only and of one time; return its size and digest."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, _FILE_MODE)  # whatever the umask is
        os.utime(descriptor, ns=(_SEALED_NS, _SEALED_NS))
    return len(content), hashlib.sha256(content).hexdigest()


def is_sealed(found: os.stat_result, size: int) -> bool:
    """Return whether a file has the size, mode and time that it was sealed with."""
    return (found.st_size, found.st_mode, found.st_mtime_ns) == (
        size, stat.S_IFREG | _FILE_MODE, _SEALED_NS,
    )  # fmt: skip

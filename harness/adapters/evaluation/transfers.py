"""`LASTING` and `lasting`: settings of cells for trials.  `upload` and `download`: files and
folders of the host and a cell, as tar archives.

An archive from a cell may be hostile: it is bounded, only its regular files are written, and only below
the folder that they are for.
"""

import os
from pathlib import Path, PurePosixPath

import msgspec

from ....policies.errors import PolicyError, WorkspaceError
from ....policies.policy import Policy
from ....runner.settings import SessionSettings
from ...sandbox.calls.call_request import as_bytes
from ...sandbox.workspaces.archive import content_of_paths, pack, unpack
from ..common.cell_sandbox_session import AdapterSession, CommandOutput

MOST_BYTES = 256 * 1024 * 1024  # the host holds an archive from a cell in memory
_DAY = 86_400.0
# The framework ends its trials; until then a session lives, and a command may run.
LASTING = SessionSettings(idle_seconds=7 * _DAY, lifetime_seconds=7 * _DAY, freeze_seconds=_DAY)
_THERE = {"/workspace", "/tmp"}  # noqa: S108 - of the cell
_CHANGED = b"file changed as we read it"


def lasting(policy: Policy, *places: str) -> Policy:
    """Return `policy` with a day for each command, and for the processors of the cell; the cell has for
    each of the absolute paths `places` a directory of its own, the first part of the path."""
    limits = policy.limits
    changed = msgspec.structs.replace(
        limits, wall_seconds=_DAY, cpu_seconds=_DAY * max(1.0, limits.cpus)
    )
    tops = {"/" + PurePosixPath(each).parts[1] for each in places} - _THERE
    own = tuple(sorted(tops.union(policy.filesystem.own)))
    files = msgspec.structs.replace(policy.filesystem, own=own)
    return msgspec.structs.replace(policy, limits=changed, filesystem=files)


def upload(cell: AdapterSession, source: str | os.PathLike[str], target: str) -> None:
    """Copy a file to the path `target`, or what a folder holds into the folder `target`.

    Links are followed if they stay in the folder.  In an image the files belong to root.  Raises
    OSError, and PolicyError for anything that is neither a file nor a folder.
    """
    host = Path(source)
    name = "." if host.is_dir() else PurePosixPath(target).name
    folder = target if host.is_dir() else str(PurePosixPath(target).parent)
    cell.files.make_directory(folder)
    files = {path: as_bytes("file", each) for path, each in content_of_paths({name: host}).items()}
    if files:
        done = cell.run(["tar", "-xmf", "-", "-C", folder], stdin=pack(files), user=cell.root)
        if done.exit_code != 0:
            raise OSError(f"cannot copy {host} to {target}: {_words(done)}")


def download(cell: AdapterSession, source: str, target: str | os.PathLike[str]) -> None:
    """Copy the regular files of a folder of the cell into the folder `target`.

    Raises OSError if the folder cannot be read, and WorkspaceError if it holds more than MOST_BYTES or
    names that lead out of `target`.
    """
    pack_all = ["tar", "-cf", "-", "-C", source, "."]
    done = cell.run(pack_all, max_output_bytes=MOST_BYTES, user=cell.root)
    if done.exit_code != 0 and not _only_changed(done):
        raise OSError(f"cannot read {source}: {_words(done)}")
    if done.is_truncated:
        raise WorkspaceError(f"{source}: holds more than {MOST_BYTES} bytes")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files = unpack(done.stdout)
    except PolicyError as error:
        raise WorkspaceError(f"{source}: {error.what}") from None
    for name, content in files.items():
        _write_below(folder, name, content)


def download_file(cell: AdapterSession, source: str, target: str | os.PathLike[str]) -> None:
    """Copy a file of the cell to the path `target`; raises OSError."""
    content = cell.files.read(source, MOST_BYTES)
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _write_below(folder: Path, name: str, content: bytes) -> None:
    path = folder.joinpath(name)
    if "\0" in name or ".." in path.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise WorkspaceError(f"a file of the cell leads out of {folder}: {name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _only_changed(done: CommandOutput) -> bool:
    """Tell whether tar warned only that files changed meanwhile: such an archive is whole."""
    lines = done.stderr.splitlines()
    return done.exit_code == 1 and bool(lines) and all(each.endswith(_CHANGED) for each in lines)


def _words(done: CommandOutput) -> str:
    return "it took too long" if done.timed_out else done.text[1].strip()[-500:]

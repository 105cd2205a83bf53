"""Work on the files of layers by confined processes, one for each piece (`layer_process.py`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....policies.compiling.seccomp import compile_filter
from ....policies.compiling.syscalls import syscall_table
from ....policies.errors import LaunchError, PolicyError
from ....policies.plan import Rule
from ....runner import channel
from ....runner.confined.confined_process import ConfinedProcess
from ....runner.host.image_ids import ImageIds, map_process
from ....runner.launching.spawn import interpreter
from ....runner.messages import Failed, decode, encode
from .layer_process import (
    ArchiveChanges,
    EmptyDirectory,
    ExpandArchive,
    LayerBoot,
    LayerRefused,
    LayerWork,
    LayerWritten,
    WriteLayer,
)

_MODULE = f"{__package__}.layer_process"
_GRACE_SECONDS = 30.0  # beyond the limit that the process itself keeps
_EMPTYING_SECONDS = 900.0
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Beside those for computing: owners, whiteouts, opaque directories.
_FILE_CALLS = ("chown", "fchown", "lchown", "fchownat", "mknod", "mknodat", "setxattr", "fsetxattr")


class ImageLimits(NamedTuple):
    """The limits of all archives of one image."""

    total_bytes: int = 16 << 30
    members: int = 1_000_000
    seconds: float = 900.0  # for each archive


class ArchivePart(NamedTuple):
    """An open archive: `size` bytes of a file from `start` on; of a pipe size -1."""

    file: int
    start: int
    size: int
    name: str  # for errors


def write_layer(
    place: Path, archive: ArchivePart, ids: ImageIds, limits: ImageLimits, *, merges: bool = False
) -> LayerWritten:
    """Write the archive into the directory `place`, which belongs to root of `ids`.

    Raises PolicyError if it is malformed or larger than the limits, LaunchError.
    """
    work = WriteLayer(
        archive.start, archive.size, limits.total_bytes, limits.members, limits.seconds, merges
    )
    with _opened(place) as directory:
        files = directory, archive.file
        return _worked(work, files, ids, limits.seconds, archive.name)


def expand(
    archive: ArchivePart, into: int, scratch: Path, ids: ImageIds, limits: ImageLimits
) -> LayerWritten:
    """Write the uncompressed bytes of an archive into a file; `scratch` is an empty directory, which
    belongs to root of `ids`.

    Raises as `write_layer`.
    """
    work = ExpandArchive(archive.size, limits.total_bytes, limits.seconds)
    with _opened(scratch) as directory:
        files = directory, archive.file, into
        return _worked(work, files, ids, limits.seconds, archive.name)


def archive_changes(changes: int, out: int, ids: ImageIds, limits: ImageLimits) -> None:
    """Write what a cell has changed in its image, the open upper directory of an overlay, into the file
    `out` as the archive of a layer.

    Raises as `write_layer`.
    """
    work = ArchiveChanges(limits.total_bytes, limits.members, limits.seconds)
    _worked(work, (changes, out), ids, limits.seconds, "the changes of the cell")


def empty(place: Path, ids: ImageIds) -> None:
    """Remove everything in the directory `place`, whose files belong to `ids`.

    Raises as `write_layer`.
    """
    with _opened(place) as directory:
        _worked(EmptyDirectory(), (directory,), ids, _EMPTYING_SECONDS, str(place))


@contextmanager
def _opened(place: Path) -> Iterator[int]:
    directory = os.open(place, _DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def _worked(
    work: LayerWork, descriptors: tuple[int, ...], ids: ImageIds, seconds: float, name: str
) -> LayerWritten:
    process = ConfinedProcess(
        interpreter(), _MODULE, LayerBoot(ids, _filter()), "the layer process"
    )
    try:
        map_process(process.pid, ids)
        channel.send(process.control, encode(work), descriptors)
        answer = _answer(process, seconds + _GRACE_SECONDS)
    except (OSError, msgspec.DecodeError, channel.ProtocolError) as error:
        raise LaunchError(f"the layer process failed at {name}: {error}") from None
    finally:
        process.end()
    if isinstance(answer, Failed):
        raise LaunchError(f"the layer process failed at {name}: {answer.words}")
    if isinstance(answer, LayerRefused):
        raise PolicyError(f"image: {name}: {answer.why}", _hint(answer.why))
    return answer


def _answer(process: ConfinedProcess, seconds: float) -> LayerWritten | LayerRefused | Failed:
    if not channel.has_news(process.control.fileno(), seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    frame = channel.Receiver(process.control, channel.PACKET_BYTES).receive_whole()
    if not frame:
        raise ConnectionResetError("it ended; it may have needed more memory than it may have")
    answer: LayerWritten | LayerRefused | Failed = decode(
        frame, LayerWritten | LayerRefused | Failed
    )
    return answer


def _hint(why: str) -> str:
    if "zstd" in why:
        return "copy the image with layers of gzip: skopeo copy --dest-compress-format gzip"
    if "limit" in why or "more than" in why:
        return "ImageLimits of ImageStore has the limits"
    return ""


@cache
def _filter() -> bytes:
    """Return the filter of the layer process: computation and files, no new process or socket."""
    table = syscall_table()
    kept = tuple(rule for rule in table.rules(("base",)) if rule.call not in _FILE_CALLS)
    return compile_filter((*kept, *map(Rule, (*_FILE_CALLS, "sendmsg", "recvmsg"))), table)

"""The layer process: does one piece of work on the files of a layer, confined, and ends.

It is the first process that reads the content of an image, so a hole in the reader of archives gives an
attacker this process: root of a user namespace with the ids of images, its root is the directory of the
layer, and its system calls are those on files.  The store starts it (`layer_work.py` is the outside) as
`python -I -S` with an empty environment and one SOCK_SEQPACKET socket as descriptor 3.
"""

import os
import socket
import sys
import zlib
from typing import NoReturn

import msgspec

from ....runner import channel
from ....runner.confined import confinement
from ....runner.confined.confinement import serve_confined
from ....runner.host.image_ids import ImageIds, become_root
from ....runner.kernel import credentials, process_calls
from ....runner.kernel import file_calls as files
from ....runner.kernel.steps import Now
from ....runner.messages import decode, encode
from .layer_stream import LayerStream, pieces_of
from .layer_writer import LayerWriter
from .tree_archive import TreeArchive, TreeLimits

# the archive's headers, beside the bytes of its files
_HEADER_BYTES = 1 << 10
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID: over files of the mapped ids
_CAPABILITIES = (0, 1, 3, 4)
_LIMITS = {"NOFILE": 64, "CORE": 0, "DATA": 1 << 30, "NPROC": 0}


class LayerBoot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first frame: the ids that the supervisor will map, and the filter of system calls."""

    ids: ImageIds
    filter: bytes


class WriteLayer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write an archive into a directory; comes with both, the directory first.

    start, size: the part of the archive's file; size -1 for a pipe
    merges: make a plain directory (`LayerWriter`)
    """

    start: int
    size: int
    most_bytes: int
    most_members: int
    seconds: float
    merges: bool


class EmptyDirectory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove everything in a directory, with which it comes."""


class ExpandArchive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the uncompressed bytes of an archive into a file; comes with an empty directory, the
    archive and the file."""

    size: int
    most_bytes: int
    seconds: float


class ArchiveChanges(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the upper directory of an overlay as a layer's archive; comes with it, and the file."""

    most_bytes: int
    most_members: int
    seconds: float


class LayerWritten(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The work is done; the fields are those of `Written`."""

    blob: str = ""
    diff: str = ""
    size_bytes: int = 0
    members: int = 0


class LayerRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The archive is malformed or too large, or the disk refused it."""

    why: str


LayerWork = WriteLayer | EmptyDirectory | ExpandArchive | ArchiveChanges


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, enter a user namespace, and do the work of one frame."""
    del sys.path[:own_paths]  # all modules of cellwright are imported
    serve_confined(LayerBoot, _unshare, _serve)


def _unshare(_: LayerBoot) -> None:
    process_calls.unshare(
        process_calls.CLONE_NEWUSER | process_calls.CLONE_NEWNET | process_calls.CLONE_NEWIPC
    )


def _serve(sock: socket.socket, boot: LayerBoot) -> None:
    """Serve one frame, which comes once the ids are mapped."""
    frame, descriptors = channel.receive_with_descriptors(sock)
    if not frame:
        return
    work: LayerWork = decode(frame, LayerWork)
    become_root(boot.ids)
    os.fchdir(descriptors[0])
    os.chroot(".")
    # Opened here: the root of a layer can belong to another id, and be closed to the supervisor.
    descriptors[0] = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    credentials.clear_capabilities(Now(), _CAPABILITIES)
    confinement.confine("image-layer", 0, _LIMITS, boot.filter)
    answer: LayerWritten | LayerRefused
    try:
        answer = _answer_to(work, descriptors, has_owners=boot.ids.kind != "one")
    except (ValueError, zlib.error, RecursionError, MemoryError) as error:
        answer = LayerRefused(str(error)[:300] or type(error).__name__)
    except OSError as error:
        about = f"{error.filename}: " if isinstance(error.filename, str) else ""
        answer = LayerRefused(f"{about}{error.strerror}"[:300])
    channel.send(sock, encode(answer))


def _answer_to(work: LayerWork, descriptors: list[int], *, has_owners: bool) -> LayerWritten:
    directory = descriptors[0]
    if isinstance(work, EmptyDirectory):
        for name in os.listdir(directory):
            if os.path.isdir(name) and not os.path.islink(name):
                files.remove_tree(directory, name, is_superuser=True)
            else:
                os.unlink(name, dir_fd=directory)
        return LayerWritten()
    if isinstance(work, ExpandArchive):
        pieces = pieces_of(descriptors[1], 0, work.size)
        stream = LayerStream(pieces, work.most_bytes, work.seconds)
        blob, diff = stream.expand(descriptors[2])
        return LayerWritten(blob, diff)
    if isinstance(work, ArchiveChanges):
        limits = TreeLimits(work.most_bytes, work.most_members, work.seconds)
        archive = TreeArchive(directory, descriptors[1], limits, _owner, is_upper=True)
        archive.write()
        return LayerWritten()
    most = work.most_bytes + work.most_members * _HEADER_BYTES
    stream = LayerStream(pieces_of(descriptors[1], work.start, work.size), most, work.seconds)
    writer = LayerWriter(
        directory, work.most_bytes, work.most_members, merges=work.merges, has_owners=has_owners
    )
    return LayerWritten(*writer.add(stream))


def _owner(status: os.stat_result) -> tuple[int, int]:
    return status.st_uid, status.st_gid

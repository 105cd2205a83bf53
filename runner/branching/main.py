"""The branching process: copies the memory of sessions into fresh cells, confined, until the supervisor
is gone.

Started by the supervisor as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket as
descriptor 3. It has no capability: the id that made the launcher's user namespace owns it, and so may
trace the processes in it and below it (user_namespaces(7)). Landlock would prevent tracing: a
restricted process may trace only processes with at least its restrictions (landlock(7)).
"""

import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from .. import channel
from ..confined import confinement
from ..confined.confinement import serve_confined
from ..messages import (
    BranchCells,
    Branched,
    BranchingBoot,
    BranchRefused,
    KeepMemory,
    Kept,
    RestoreMemory,
    decode,
    encode,
)
from .copying import BranchedProcesses, branch
from .keeping import ImageReaders, keep, restore
from .layout import NotCopyable

# RLIMIT_FSIZE bounds the file that keeps a session.
_LIMITS = {"NOFILE": 1024, "CORE": 0, "FSIZE": 8 << 30, "DATA": 256 << 20}
_OTHERS = "a frame with other descriptors than it says"
_KINDS = BranchCells | KeepMemory | RestoreMemory


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, confine the process, and serve until the supervisor is gone."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGCHLD,)
    )  # kernel/tracing.py waits for SIGCHLD
    del sys.path[:own_paths]  # all modules of cellwright are imported
    serve_confined(BranchingBoot, confine, _serve_all)


def confine(boot: BranchingBoot) -> None:
    """Give up everything that branching does not need, for good."""
    confinement.confine("cell-branching", boot.uid, _LIMITS, boot.filter)


def _serve_all(sock: socket.socket, _: BranchingBoot) -> None:
    gc.freeze()
    gc.disable()  # garbage is collected after each answer instead
    images = ImageReaders()
    while _serve(sock, images):
        continue


def _serve(sock: socket.socket, images: ImageReaders) -> bool:
    """Answer one frame; False once the supervisor is gone.

    After an unexpected failure the process ends, because the traced processes may be in any state.
    """
    frame, descriptors = channel.receive_with_descriptors(sock)
    if not frame:
        return False
    try:
        answer = _answer_to(decode(frame, _KINDS), descriptors, images)
    except NotCopyable as refused:
        answer = BranchRefused(str(refused))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    channel.send(sock, encode(answer))
    del answer
    gc.collect()
    return True


def _answer_to(
    asked: BranchCells | KeepMemory | RestoreMemory, descriptors: list[int], images: ImageReaders
) -> Branched | Kept | BranchRefused:
    if isinstance(asked, KeepMemory):
        guest, init, file, *image = descriptors
        if len(image) != asked.has_image:
            raise ValueError(_OTHERS)
        fresh = images.of(image[0]) if image else None
        keep(guest, init, fresh, file, asked.most_bytes)
        return Kept()
    if isinstance(asked, RestoreMemory):
        guest, of_fresh, kept = descriptors
        restore(guest, images.of(of_fresh), kept)
        return Branched()
    source, init, *others = descriptors
    if len(others) != asked.cells * (1 + asked.maps) + asked.maps:
        raise ValueError(_OTHERS)
    targets, maps = tuple(others[: asked.cells]), tuple(others[asked.cells :])
    branch(BranchedProcesses(source, init, targets, maps))
    return Branched()

"""The branching process: copies the memory of sessions into fresh cells, confined, until the supervisor
is gone.

Started by the supervisor as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket as
descriptor 3.  It has no capability: the id that made the launcher's user namespace owns it, and so may
trace the processes in it and below it (user_namespaces(7)).  Landlock would take that away, because a
restricted process may trace only what is restricted as it is (landlock(7)).
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

from .. import channel
from ..kernel import privileges, processes
from ..kernel.now import Now
from ..messages import (
    Booted,
    BranchCells,
    Branched,
    BranchingBoot,
    BranchRefused,
    Failed,
    KeepMemory,
    Kept,
    RestoreMemory,
    decode,
    encode,
)
from .copying import BranchedProcesses, branch
from .keeping import keep, restore
from .kept import ImageReaders
from .layout import NotCopyable

_CONTROL = 3
_MEMORY_BYTES = 256 << 20
_OPEN_FILES = 1024
_FILE_BYTES = 8 << 30  # of what is kept of a session
_OTHERS = "a frame with other descriptors than it says"
_KINDS = BranchCells | KeepMemory | RestoreMemory


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, confine the process, and serve until the supervisor is gone."""
    sock = socket.socket(fileno=_CONTROL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))  # kernel/tracing.py waits for it
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    try:
        del sys.path[:own_paths]  # everything of ours is imported
        boot = decode(channel.Receiver(sock, channel.PACKET_BYTES).receive_whole(), BranchingBoot)
        confine(boot)
        channel.send(sock, encode(Booted()))
        gc.freeze()
        gc.disable()  # what a frame leaves is collected once it is answered
        images = ImageReaders()
        while _serve(sock, images):
            continue
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        with contextlib.suppress(OSError):
            channel.send(sock, encode(_failed(error)))
        os._exit(1)
    os._exit(0)


def confine(boot: BranchingBoot) -> None:
    """Give up everything that branching does not need, for good."""
    do = Now()
    privileges.set_name(do, "cell-branching")
    if boot.uid:
        privileges.become(boot.uid)
    privileges.set_dumpable(do, 0)
    most_of = {"NOFILE": _OPEN_FILES, "CORE": 0, "FSIZE": _FILE_BYTES, "DATA": _MEMORY_BYTES}
    for name, most in most_of.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (limit, limit))
    privileges.set_no_new_privs(do)
    privileges.install_seccomp_filter(do, boot.filter)


def _serve(sock: socket.socket, images: ImageReaders) -> bool:
    """Answer one frame; False once the supervisor is gone.

    After a failure that is no refusal the process ends: what it traced may be in any state.
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


def _failed(error: BaseException) -> Failed:
    about = getattr(error, "filename", None) or type(error).__name__
    return Failed(
        getattr(error, "errno", None) or 0, f"{about}: {getattr(error, 'strerror', error)}"
    )

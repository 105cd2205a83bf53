"""The first program of a launcher whose cells have an image as their root.

It makes a mount namespace in which all files of the host lie below /.cellwright too, and starts the
launcher's interpreter there.  The paths of the interpreter are then the same in cells, in which the
usual places have the files of the image.  An ordinary user enters a user namespace first.
"""

import _socket
import os
import sys
from typing import NoReturn

from ...policies.plan import ImagePlan
from .. import channel
from ..fixed_root import IMAGE_PREFIX
from ..host.image_ids import ImageIds, become_root, map_process
from ..kernel import mounts
from ..kernel import process_calls as processes
from ..kernel.steps import Now
from ..messages import Failed, ImageStage, decode, encode

_CONTROL, _STAGE_BYTES = 3, 256 * 1024
_STAGING = "/tmp"  # noqa: S108 - a mount point in our own mount namespace; nothing is written to it


def main(_: int) -> NoReturn:
    """Read the ImageStage frame and become what it says."""
    sock = _socket.socket(fileno=_CONTROL)
    try:
        stage = decode(channel.Receiver(sock, _STAGE_BYTES).receive_whole(), ImageStage)
        if os.geteuid():
            enter_ids(stage)
        processes.unshare(processes.CLONE_NEWNS)
        _show_the_host_twice()
        os.execve(stage.command[0], stage.command, {})  # noqa: S606 - no shell is wanted
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        channel.send(sock, encode(Failed.of(error)))
    os._exit(1)


def enter_ids(given: ImageStage | ImagePlan) -> None:
    """Move into a new user namespace with the ids of an image, and become its root; raises OSError.  A
    child maps them, because only a process outside may map several."""
    ids = ImageIds(given.kind, given.uids, given.gids)
    told, tell = os.pipe2(os.O_CLOEXEC)
    itself = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(tell)
            if os.read(told, 1):
                map_process(itself, ids)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the line before os._exit
            sys.stderr.write(f"{error}\n")
        finally:
            os._exit(1)
    os.close(told)
    try:
        if os.geteuid() == 0:
            os.setgroups([])
        processes.unshare(processes.CLONE_NEWUSER)
        os.write(tell, b"m")
    finally:
        os.close(tell)
        _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(0, "mapping the ids of the image failed", "image")
    become_root(ids)


def _show_the_host_twice() -> None:
    do = Now()
    mounts.make_private()
    with os.scandir("/") as found:
        entries = sorted(found, key=lambda entry: entry.name)
    shown = [(mounts.clone(do, "/"), IMAGE_PREFIX, True)]
    links = []
    for entry in entries:
        if entry.is_symlink():
            links.append((entry.path, os.readlink(entry.path)))
        elif entry.path != IMAGE_PREFIX:
            shown.append((mounts.clone(do, entry.path), entry.path, entry.is_dir()))
    attributes = mounts.NOSUID | mounts.NODEV
    mounts.put(do, mounts.new(do, "tmpfs", attributes, size="1M", mode="0755"), _STAGING)
    for tree, path, is_directory in shown:
        mounts.put_making(do, tree, _STAGING + path, is_directory=is_directory)
    for path, target in links:
        os.symlink(target, _STAGING + path)
    mounts.pivot_into(_STAGING)

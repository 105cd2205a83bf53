"""The guest's process from its birth to the moment its program may come.

It is pid 2 of the cell: pid 1, its init, was there before it, sleeps, and executes nothing at all.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ..channel import send
from ..messages import Entered, Failed, Listening, Mounted, encode
from . import privileges
from .enter import CONTROL, Descriptors, Site, enter

_SETUP_FAILED = 70  # EX_SOFTWARE; the status channel says what failed


class Guest(NamedTuple):
    """What the guest's process does: `rehearse`, if anything, before the supervisor hears of it, and
    `serve`, which is called with the control descriptor and must not return."""

    rehearse: Callable[[], None] | None
    serve: Callable[[int], NoReturn]


def become_guest(site: Site, descriptors: Descriptors, guest: Guest) -> NoReturn:
    """Confine this process, tell the supervisor, and serve; then only the guest's four are open."""
    descriptors = _clear_of(site.plan.open_files, descriptors)
    status = _status_channel(descriptors.status, site.plan.open_files)
    try:
        privileges.set_process_name("cell-guest")
        enter(site, descriptors, lambda frame, descriptor: _hand_over(status, frame, descriptor))
        if guest.rehearse:
            guest.rehearse()
        send(status, encode(Entered()))
        status.close()  # the last but those four: the rest was swept away at the start
        guest.serve(CONTROL)
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        _report(status, error)
    os._exit(_SETUP_FAILED)


def _clear_of(number: int, descriptors: Descriptors) -> Descriptors:
    """Free `number` of the cell's own descriptors: where many cells live, one of them may have it."""

    def moved(descriptor: int) -> int:
        return os.dup(descriptor) if descriptor == number else descriptor

    status, control, stdin, stdout, stderr = map(moved, descriptors[:-1])
    cgroups = tuple(map(moved, descriptors.cgroups))
    return Descriptors(status, control, stdin, stdout, stderr, cgroups)


def _status_channel(descriptor: int, number: int) -> socket.socket:
    """Put the status channel at a `number` that the guest, once it is closed, cannot use again."""
    os.dup2(descriptor, number, inheritable=False)
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number)


def _hand_over(status: socket.socket, frame: Mounted | Listening, descriptor: int) -> None:
    send(status, encode(frame), (descriptor,))
    os.close(descriptor)


def _report(status: socket.socket, error: BaseException) -> None:
    if isinstance(error, OSError):
        text = f"{error.filename or 'a system call'}: {error.strerror}"
    else:
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the supervisor may have lost interest
        send(status, encode(Failed(getattr(error, "errno", None) or 0, text)))

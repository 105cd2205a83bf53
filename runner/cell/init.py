"""Pid 1 of a cell: starts the guest's process, reaps orphans, reports the guest's end.

It runs no guest code, cannot be inspected by the guest (non-dumpable), ignores every signal from
inside its pid namespace (pid_namespaces(7)), and takes the whole cell with it when it exits.
"""

import os
import socket
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ..channel import send
from ..kernel import processes
from ..messages import Ended, Entered, Failed, Listening, Mounted, encode
from . import privileges
from .enter import CONTROL, Descriptors, Site, confine_guest, confine_init, enter

_SETUP_FAILED = 70  # EX_SOFTWARE; the status channel says what failed


class Guest(NamedTuple):
    """What the guest's process does: `rehearse`, if anything, before the supervisor hears of it, and
    `serve`, which is called with the control descriptor and must not return."""

    rehearse: Callable[[], None] | None
    serve: Callable[[int], NoReturn]


def run_cell(site: Site, descriptors: Descriptors, guest: Guest) -> NoReturn:
    """Confine this process, start `guest` in a child of it and stay as its init."""
    status = _status_channel(descriptors.status, site.plan.open_files)
    try:
        enter(site, descriptors)
        confined = os.eventfd(0, os.EFD_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _become_guest(site, status, confined, guest.rehearse)
            guest.serve(CONTROL)
        _become_init(site, status, confined)
        _reap_until(pid, status)
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        _report(status, error)
    os._exit(_SETUP_FAILED)


def _become_guest(
    site: Site, status: socket.socket, confined: int, rehearse: Callable[[], None] | None
) -> None:
    """Confine this process and tell the supervisor; afterwards only the guest's four are open."""
    privileges.set_process_name("cell-guest")
    confine_guest(site, lambda frame, descriptor: _hand_over(status, frame, descriptor))
    if rehearse:
        rehearse()
    os.eventfd_read(confined)  # no byte of guest code runs beside an init without its layers
    send(status, encode(Entered()))
    status.detach()
    processes.close_range(CONTROL + 1, 0xFFFFFFFF)


def _status_channel(descriptor: int, number: int) -> socket.socket:
    """Put the status channel at a `number` that the guest, once it is closed, cannot use again."""
    os.dup2(descriptor, number, inheritable=False)
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number)


def _hand_over(status: socket.socket, frame: Mounted | Listening, descriptor: int) -> None:
    send(status, encode(frame), (descriptor,))
    os.close(descriptor)


def _become_init(site: Site, status: socket.socket, confined: int) -> None:
    privileges.set_process_name("cell-init")
    processes.close_all_but([status.fileno(), confined, site.host_proc])
    confine_init(site)
    os.eventfd_write(confined, 1)


def _reap_until(guest: int, status: socket.socket) -> NoReturn:
    """Reap whatever is orphaned to us; when the guest's main process ends, end the cell."""
    while True:
        pid, wait_status = os.waitpid(-1, 0)
        if pid == guest:
            send(status, encode(Ended(wait_status)))
            os._exit(0)


def _report(status: socket.socket, error: BaseException) -> None:
    if isinstance(error, OSError):
        text = f"{error.filename or 'a system call'}: {error.strerror}"
    else:
        text = f"{type(error).__name__}: {error}"
    send(status, encode(Failed(getattr(error, "errno", None) or 0, text)))

"""What the launcher does once it has left the host: it forks cells, and tells how they end."""

import contextlib
import os
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .. import channel
from ..cell import interpreter
from ..cell.enter import Descriptors, Site
from ..cell.guest import Guest, become_guest
from ..messages import Ended, Failed, Fork, Forked, Reaped, Status, decode, encode
from .inits import Init, Inits


def serve(site: Site, sock: socket.socket, inits: Inits, keeper: int) -> None:
    """Fork cells until the supervisor closes `sock` or the process behind `keeper` is gone."""
    _Forking(site, sock, inits, keeper).serve()


class _Cell(NamedTuple):
    """A cell as the launcher knows it."""

    init: Init
    guest: int
    guest_pidfd: int
    status: socket.socket


class _Forking:
    """Forks a cell per Fork frame, reaps it, and says so on the cell's status channel."""

    def __init__(self, site: Site, sock: socket.socket, inits: Inits, keeper: int) -> None:
        self._site = site
        self._sock = sock
        self._inits = inits
        self._ends: dict[int, Callable[[], None]] = {}  # pidfd -> what to do once it has ended
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._keeper = keeper
        self._poll.register(keeper, select.POLLIN)

    def serve(self) -> None:
        """Serve until the supervisor closes the socket or the keeper is gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._keeper:
                    return
                if descriptor != self._sock.fileno():
                    self._poll.unregister(descriptor)
                    self._ends.pop(descriptor)()
                elif not self._serve_one():
                    return

    def _serve_one(self) -> bool:
        frame, received = channel.receive_with_descriptors(self._sock)
        if not frame:
            return False
        fork = decode(frame, Fork)
        cgroup = received.pop() if fork.into_cgroup else None
        status, control, stdin, stdout, stderr, *cgroups = received
        descriptors = Descriptors(status, control, stdin, stdout, stderr, tuple(cgroups))
        try:
            self._fork(descriptors, cgroup, parked=fork.parked)
        finally:
            for each in received[1:] if cgroup is None else [cgroup, *received[1:]]:
                os.close(each)
        return True

    def _fork(self, descriptors: Descriptors, cgroup: int | None, *, parked: bool) -> None:
        status = socket.socket(fileno=descriptors.status)
        try:
            pid, pidfd, init = self._inits.fork(cgroup)
        except OSError as error:
            _tell(status, Failed(error.errno or 0, f"{error.filename}: {error.strerror}"))
            status.close()
            return
        if pid == 0:
            wanted = parked and not self._site.plan.program
            rehearse = interpreter.rehearse if wanted else None
            become_guest(self._site, descriptors, Guest(rehearse, interpreter.serve))
        _tell(status, Forked(), (init.pidfd, pidfd))
        self._at_end_of(pidfd, partial(self._reap_guest, _Cell(init, pid, pidfd, status)))

    def _at_end_of(self, pidfd: int, do: Callable[[], None]) -> None:
        self._ends[pidfd] = do
        self._poll.register(pidfd, select.POLLIN)

    def _reap_guest(self, cell: _Cell) -> None:
        """The guest's main process has ended, and with it the cell."""
        _, wait_status, usage = os.wait4(cell.guest, 0)
        os.close(cell.guest_pidfd)
        _tell(cell.status, Ended(wait_status))
        cell.init.kill()
        used = Reaped(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
        self._at_end_of(cell.init.pidfd, partial(_bury, cell, used))


def _bury(cell: _Cell, used: Reaped) -> None:
    """Nothing of the cell runs any more: init ends last."""
    os.close(cell.init.pidfd)
    _tell(cell.status, used)
    cell.status.close()


def _tell(status: socket.socket, frame: Status, descriptors: tuple[int, ...] = ()) -> None:
    """Send a status frame, to nobody if the supervisor has lost interest in the cell."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(status, encode(frame), descriptors)

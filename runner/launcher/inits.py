"""The inits of cells: pid 1 of each, and with it the namespaces of a cell, made ahead of need.

An init executes nothing: it is in pause(2) from its first moment, and so can share the memory of
the process that makes it and costs next to nothing to keep.  It has nothing to do.  Signals from
within its pid namespace do not reach it, for it handles none (pid_namespaces(7)); what is orphaned
to it is reaped by the kernel, because it ignores SIGCHLD (wait(2), NOTES); and when it is killed, the
kernel kills everything in its pid namespace.

The nursery makes them, a process beside the launcher: a process that ignores SIGCHLD cannot wait for a
guest, and one that has moved into a cell's namespaces cannot make new ones.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import os
from typing import NoReturn

from .. import channel
from ..cell import privileges
from ..kernel import privileges as kernel
from ..kernel import processes
from ..kernel.now import Now
from ..messages import Failed, InitMade, encode
from .networks import NetworkNamespaces

_READY = 2  # a new network namespace takes 0.2 to 0.5 ms: not while somebody waits for a cell
_TRIES = 3
NAMES = ("net", "ipc", "uts")
_NETWORK = 1  # among the descriptors of an init's namespaces
NAMESPACES = (
    processes.CLONE_NEWPID | processes.CLONE_NEWNET
    | processes.CLONE_NEWIPC | processes.CLONE_NEWUTS
)  # fmt: skip


class Nursery:
    """Makes inits as the launcher asks for them."""

    def __init__(self, launcher: _socket.socket, proc: int, cells_per_network: int) -> None:
        """`proc` is /proc of this process's pid namespace."""
        self._launcher = launcher
        self._proc = proc
        self._now = Now()
        (home,) = own_namespaces(("net",), proc)
        self._networks = NetworkNamespaces(proc, home, cells_per_network)

    def serve(self, last_capability: int, program: bytes) -> NoReturn:
        """Confine this process, and so its inits, and make inits until the launcher is gone.

        Its end is the end of every cell: it is pid 1 of the pid namespace that they are all in.
        """
        _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
        privileges.set_process_name(self._now, "cell-nursery")
        privileges.make_undumpable(self._now)
        kept = [self._launcher.fileno(), self._proc, *self._networks.descriptors()]
        processes.close_all_but(kept)
        privileges.keep_only_sys_admin(self._now, last_capability)
        kernel.install_seccomp_filter(self._now, program)
        while asked := self._launcher.recv(1 + _READY):
            for _ in asked:
                self._make()
        os._exit(0)

    def _make(self) -> None:
        cells = self._networks.enter_used()
        try:
            pidfd, *namespaces = self._sleeper(
                NAMESPACES & ~processes.CLONE_NEWNET if cells else NAMESPACES
            )
        except OSError as error:
            failed = Failed(error.errno or 0, error.filename)
            channel.send(self._launcher, encode(failed))
            return
        finally:
            if cells:
                self._networks.go_home()
        channel.send(self._launcher, encode(InitMade()), (pidfd, *namespaces))
        kept = self._networks.lend(pidfd, namespaces[_NETWORK], cells + 1)
        for descriptor in {pidfd, *namespaces}.difference(kept):
            os.close(descriptor)

    def _sleeper(self, namespaces: int) -> tuple[int, ...]:
        privileges.set_process_name(self._now, "cell-init")
        try:
            for _ in range(_TRIES - 1):
                with contextlib.suppress(ProcessLookupError):  # the child that makes it was killed
                    return processes.sleeper(namespaces, self._proc)
            return processes.sleeper(namespaces, self._proc)
        finally:
            privileges.set_process_name(self._now, "cell-nursery")


def own_namespaces(names: tuple[str, ...], proc: int) -> list[int]:
    """Open namespaces of this process; raises OSError, after which it may not go on."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    return [os.open(f"self/ns/{name}", flags, dir_fd=proc) for name in names]

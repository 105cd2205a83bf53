"""The inits of cells: pid 1 of each, and with it the namespaces of a cell, made ahead of need.

An init executes nothing: it is in pause(2) from its first moment, and so can share the memory of the
process that makes it and costs next to nothing to keep. It has nothing to do. Signals from its pid
namespace do not reach it, because it handles none (pid_namespaces(7)). The kernel reaps its orphans,
because it ignores SIGCHLD (wait(2), NOTES). When it is killed, the kernel kills everything in its pid
namespace.

The nursery makes them, a process beside the launcher: a process that ignores SIGCHLD cannot wait for a
guest, and one that has moved into a cell's namespaces cannot make new ones.

It lends a network namespace to a cell when an earlier cell is gone. Making and ending one takes more
than a tenth of the CPU time of a run (benchmarks/results/where-time-goes.md). Only cells whose programs
make no socket but AF_UNIX share one: no packet is ever sent there, and no program has a capability
over it. In doubt the nursery makes a new one.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import os
import select
from typing import NamedTuple, NoReturn

from .. import channel
from ..cell import privileges
from ..kernel import credentials as kernel
from ..kernel import process_calls as processes
from ..kernel.steps import Now
from ..messages import Failed, InitMade, encode

# Namespaces beyond this number are not kept, because an idle one holds kernel memory.
_MOST = 24
# The kernel's count of a namespace's sockets, of any family, until each is freed. A socket that a dead
# cell's processes sent to each other and never received also counts (af_unix: unix_gc).
_COUNT = "self/net/sockstat"
_NO_SOCKET = b"sockets: used 0\n"


class _Lent(NamedTuple):
    network: int  # descriptor of the network namespace
    cells: int  # cells that have used the namespace, the present one included


class NetworkNamespaces:
    """Lends each to at most `cells_each` cells; for the nursery alone, which moves into them."""

    def __init__(self, proc: int, home: int, cells_each: int) -> None:
        """`proc` is /proc of this process's pid namespace, `home` its network namespace."""
        self._proc, self._home, self._cells_each = proc, home, cells_each
        self._lent: dict[int, _Lent] = {}  # lent namespaces by the pidfd of the init
        self._ends = select.epoll()

    def descriptors(self) -> list[int]:
        """Return the namespaces that it always has."""
        return [self._home, self._ends.fileno()]

    def enter_used(self) -> int:
        """Move into one that nothing of a cell is in any more; return how many cells have had it.

        If there is none, return 0 and stay.
        """
        while ended := self._ends.poll(0, 1):
            # The end of an init is reported when every process of its pid namespace was reaped
            # (zap_pid_ns_processes): none of them can make another socket.
            lent = self._take_back(ended[0][0])
            if self._enter(lent.network):
                return lent.cells
        return 0

    def go_home(self) -> None:
        """Leave the one that was entered; raises OSError, after which this process may not go on."""
        processes.enter(self._home, processes.CLONE_NEWNET)

    def lend(self, init: int, network: int, cells: int) -> tuple[int, ...]:
        """Note that the cell of `init`, a pidfd, has `network` as the last of `cells`.

        Return those of the two descriptors that are kept.
        """
        if cells >= self._cells_each or len(self._lent) >= _MOST:
            return ()
        self._ends.register(init, select.EPOLLIN)
        self._lent[init] = _Lent(network, cells)
        return init, network

    def _take_back(self, init: int) -> _Lent:
        self._ends.unregister(init)
        os.close(init)
        return self._lent.pop(init)

    def _enter(self, network: int) -> bool:
        """Move into `network` and stay if no socket is left in it; the descriptor is closed."""
        try:
            processes.enter(network, processes.CLONE_NEWNET)
        except OSError:  # the namespace cannot be entered: stay in the own one
            return False
        finally:
            os.close(network)
        if self._has_no_socket():
            return True
        self.go_home()
        return False

    def _has_no_socket(self) -> bool:
        try:
            counts = os.open(_COUNT, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return False
        try:
            return os.read(counts, len(_NO_SOCKET)) == _NO_SOCKET
        except OSError:
            return False
        finally:
            os.close(counts)


_READY = 2  # made ahead of need, because a new network namespace takes 0.2 to 0.5 ms
_TRIES = 3
NAMES = ("net", "ipc", "uts")
_NETWORK = 1  # index of the network namespace among an init's descriptors
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

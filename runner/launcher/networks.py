"""`NetworkNamespaces`: those that the nursery lends to a cell once an earlier cell is gone.

To make one and to end it takes more than a tenth of the CPU time of a run (benchmarks/README.md).
Only a plan whose cells make no socket but AF_UNIX has them used again (policies/compile.py), so that no
packet is ever sent in one, and no program in it has a capability over it.  In doubt a new one is made.
"""

import os
import select
from typing import NamedTuple

from ..kernel import processes

# Those of further cells are not kept: an idle one holds memory of the kernel.
_MOST = 24
# The sockets of a namespace, of any family, as the kernel counts them until each is freed: one that a
# dead cell's processes sent to each other and never received counts too (af_unix: unix_gc).
_COUNT = "self/net/sockstat"
_NO_SOCKET = b"sockets: used 0\n"


class _Lent(NamedTuple):
    network: int  # its descriptor
    cells: int  # that have had it, the present one included


class NetworkNamespaces:
    """Lends each to at most `cells_each` cells; for the nursery alone, which moves into them."""

    def __init__(self, proc: int, home: int, cells_each: int) -> None:
        """`proc` is /proc of this process's pid namespace, `home` its network namespace."""
        self._proc, self._home, self._cells_each = proc, home, cells_each
        self._lent: dict[int, _Lent] = {}  # by the pidfd of the init
        self._ends = select.epoll()

    def descriptors(self) -> list[int]:
        """Return those that it always has."""
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

        Return what is kept of the two descriptors.
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
        except OSError:  # stay at home
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

"""The TCP connections of a cell that no process has accepted: kernel memory that no cgroup counts.

The kernel makes the socket of the server's end when the client's last packet arrives, outside of any
process, and charges it and what it holds to a cgroup in accept(2) only (inet_csk_accept).  Until
then a connection costs 4 KiB, and 128 KiB with data that its client left before it closed: 548 MiB in
six seconds where the cell's cgroup counted 7 (measured, Linux 6.18; v1 and v2 are alike).
"""

import contextlib
import os
from collections.abc import Iterator

# net.ipv4.tcp_rmem: a receive buffer that no process has read from.  SO_RCVBUF is ignored in cells.
_BYTES_EACH = 128 << 10
_MOST_LISTENING = 1024
_TABLES = ("tcp", "tcp6")  # proc_net(5); the sockets that listen come first
# Where the kernel counts the sockets of each table, and what the file has if there are none.  The end
# of a table costs 1.7 ms, as the kernel looks for its sockets among all of the host's; this costs
# 2 microseconds (measured).
_COUNTS = (("sockstat", b"\nTCP: inuse 0 "), ("sockstat6", b"TCP6: inuse 0\n"))
_LISTENS = b"0A"
_READ_BYTES = 1 << 16


class Backlogs:
    """The backlogs of all listening sockets in the network namespace of one cell."""

    def __init__(self, init: int, most_bytes: int) -> None:
        """`init` is the number of a process in the cell; `most_bytes` is what its backlogs may hold."""
        self._most = max(1, most_bytes // _BYTES_EACH)
        # Now: where memory is short, a list may not grow later.
        self._tables = [-1] * len(_TABLES)
        self._counts = [-1] * len(_COUNTS)
        try:
            for index, name in enumerate(_TABLES):
                self._tables[index] = _open(init, name)
                self._counts[index] = _open(init, _COUNTS[index][0])
        except BaseException:  # no memory, Ctrl-C: no caller would close the first table
            self.close()
            raise

    def are_too_long(self) -> bool:
        """Tell whether more connections wait than may, or too many sockets listen to be looked at."""
        listening = waiting = 0
        for index, table in enumerate(self._tables):
            for backlog in _backlogs(table) if self._has_sockets(index) else ():
                listening += 1
                waiting += backlog
                if listening > _MOST_LISTENING or waiting > self._most:
                    return True
        return False

    def _has_sockets(self, index: int) -> bool:
        """Tell whether a table may have any: the kernel counts each socket that listens.  A count other
        than zero says nothing: a connection that was reset is not counted, but waits."""
        if self._tables[index] < 0:
            return False
        count = self._counts[index]
        return count < 0 or _COUNTS[index][1] not in os.pread(count, _READ_BYTES, 0)

    def close(self) -> None:
        """Close the files, which keep the namespace; closing twice is fine."""
        for files in (self._tables, self._counts):
            while files:
                descriptor = files.pop()
                if descriptor >= 0:
                    os.close(descriptor)


def _open(init: int, name: str) -> int:
    # ENOENT: the cell has ended, or the kernel has no IPv6
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.open(f"/proc/{init}/net/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _backlogs(table: int) -> Iterator[int]:
    """Yield how many connections wait at each socket that listens."""
    offset, rest = 0, b""
    while read := os.pread(table, _READ_BYTES, offset):
        offset += len(read)
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            fields = line.split(maxsplit=5)
            if fields[:1] == [b"sl"]:  # the header
                continue
            if fields[3] != _LISTENS:
                return
            yield int(fields[4].partition(b":")[2], 16)

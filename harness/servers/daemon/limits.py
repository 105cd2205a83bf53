"""What clients may use of the daemon, each and together, and who keeps count."""

import threading
from collections import Counter
from typing import NamedTuple

from ....policies.errors import BusyError

MIB = 1024 * 1024


class ServeLimits(NamedTuple):
    """A client is a process, by the pid that the kernel tells (SO_PEERCRED in unix(7))."""

    connections: int = 256
    connections_per_client: int = 96
    running: int = 128  # requests at work, those that wait for a cell included
    running_per_client: int = 64
    request_bytes: int = 65 * MIB  # the longest frame
    held_bytes: int = 1024 * MIB  # of requests: what came of those that are unfinished, and at work
    held_bytes_per_client: int = 512 * MIB
    hello_seconds: float = 5.0  # until the first frame is there
    frame_seconds: float = 30.0  # from the first packet of a frame to its last
    idle_seconds: float = 600.0  # between two requests
    reader_seconds: float = 30.0  # until a client has taken a frame of ours


HELLO_BYTES = 4096


class Accounts:
    """Counts what each client has, and all together; safe from many threads."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._connections: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        self._held: Counter[int] = Counter()

    def connect(self, client: int) -> None:
        """Count a connection; raises BusyError, as the others do, if there are too many."""
        limits = self._limits
        most = (limits.connections_per_client, limits.connections)
        self._take(self._connections, client, 1, most, "connections")

    def disconnect(self, client: int) -> None:
        self._give(self._connections, client, 1)

    def begin(self, client: int) -> None:
        """Count a request at work."""
        most = (self._limits.running_per_client, self._limits.running)
        self._take(self._running, client, 1, most, "requests at work")

    def end(self, client: int) -> None:
        self._give(self._running, client, 1)

    def hold(self, client: int, size: int) -> None:
        """Count bytes that we keep for a client."""
        most = (self._limits.held_bytes_per_client, self._limits.held_bytes)
        self._take(self._held, client, size, most, "bytes of requests")

    def drop(self, client: int, size: int) -> None:
        self._give(self._held, client, size)

    def _take(
        self, counts: Counter[int], client: int, amount: int, most: tuple[int, int], what: str
    ) -> None:
        of_one, of_all = most
        with self._lock:
            if counts[client] + amount > of_one:
                raise BusyError(f"this process has {of_one} {what}, and may not have more")
            if counts.total() + amount > of_all:
                raise BusyError(f"the daemon has {of_all} {what}, and takes no more")
            counts[client] += amount

    def _give(self, counts: Counter[int], client: int, amount: int) -> None:
        with self._lock:
            counts[client] -= amount
            if not counts[client]:
                del counts[client]

"""`TenantQuota`: the concurrent and per-minute limits of one tenant of the daemon; `Peer`: the
process at the other end of a connection, as the kernel tells; and the limits of these clients.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....policies.errors import BusyError, QuotaExceeded
from ....runner.concurrency import ConcurrencyLimit
from ..client_quota import ClientQuota, QuotaLevel

UNLIMITED = 1_000_000
_MINUTE = 60.0


class QuotaSettings(NamedTuple):
    """None: no such quota."""

    calls: int | None = None  # concurrent calls
    queue: int = 64  # further calls that wait for their turn
    queue_seconds: float = 30.0  # longest wait in the queue
    sessions: int | None = None
    cpu_seconds_per_minute: float | None = None
    paused_bytes: int | None = None  # bytes of the states of paused sessions


class TenantQuota:
    """Counts the calls, sessions and CPU time of a tenant; safe from many threads."""

    def __init__(
        self, tenant: str, settings: QuotaSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tenant = tenant
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = ConcurrencyLimit(
            settings.calls or UNLIMITED, settings.queue_seconds, settings.queue
        )
        self._sessions = 0
        self._settings = settings
        self._cpu_left = settings.cpu_seconds_per_minute or 0.0
        self._filled_at = clock()

    @property
    def settings(self) -> QuotaSettings:
        return self._settings

    def change(self, settings: QuotaSettings) -> None:
        """Apply other quotas from now on; calls that run already go on."""
        with self._lock:
            self._refill()
            rate = settings.cpu_seconds_per_minute
            if rate is not None:
                before = self._settings.cpu_seconds_per_minute
                self._cpu_left = rate if before is None else min(self._cpu_left, rate)
            self._settings = settings
        self._calls.resize(settings.calls or UNLIMITED, settings.queue_seconds, settings.queue)

    @contextlib.contextmanager
    def turn(self, cancel: int) -> Iterator[bool]:
        """Wait for the turn of a call and hold it during the block; yield False if the descriptor
        `cancel` was readable first.  Raises QuotaExceeded."""
        self._check_cpu()
        try:
            taken = self._calls.acquire(cancel)
        except BusyError as error:
            limit = "queue" if isinstance(error, QuotaExceeded) else "calls"
            raise self._exceeded(limit, f"calls: {error.what}") from None
        try:
            yield taken
        finally:
            if taken:
                self._calls.release()

    def spend(self, cpu_seconds: float) -> None:
        """Count the CPU time of a call that ended."""
        with self._lock:
            if self._settings.cpu_seconds_per_minute is not None:
                self._refill()
                self._cpu_left -= cpu_seconds

    def take(self, owner: object, amount: int = 1) -> None:
        """Count `amount` more sessions of the tenant, whichever client opened them; raises
        QuotaExceeded."""
        with self._lock:
            most = self._settings.sessions
            if most is not None and self._sessions + amount > most:
                raise self._exceeded("sessions", f"at most {most} sessions at once")
            self._sessions += amount

    def give_back(self, owner: object, amount: int = 1) -> None:
        """Count `amount` less sessions."""
        with self._lock:
            self._sessions -= amount

    def load(self) -> tuple[int, int]:
        """Return how many calls run, and how many wait."""
        return self._calls.load()

    def cpu_seconds_left(self) -> float | None:
        """Return the CPU time that may be used now; None without a quota."""
        with self._lock:
            self._refill()
            return None if self._settings.cpu_seconds_per_minute is None else self._cpu_left

    def close(self) -> None:
        self._calls.close()

    def _check_cpu(self) -> None:
        with self._lock:
            most = self._settings.cpu_seconds_per_minute
            if most is None:
                return
            self._refill()
            if self._cpu_left <= 0:
                wait = (0.001 - self._cpu_left) / most * _MINUTE
                raise self._exceeded(
                    "cpu", f"at most {most:g} CPU seconds a minute", f"try again in {wait:.1f} s"
                )

    def _refill(self) -> None:
        now = self._clock()
        most = self._settings.cpu_seconds_per_minute
        if most is not None:
            filled = self._cpu_left + (now - self._filled_at) * most / _MINUTE
            self._cpu_left = min(most, filled)
        self._filled_at = now

    def _exceeded(self, limit: str, words: str, hint: str = "try again later") -> QuotaExceeded:
        return QuotaExceeded(f"quota of tenant {self._tenant}: {words}", hint, limit=limit)


SO_PEERGROUPS = 59  # from asm-generic/socket.h, because the module socket lacks it
_UCRED = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid
_GID = struct.Struct("I")
_MOST_BYTES = 1024  # largest answer that Python's getsockopt returns: 256 groups


class Peer(NamedTuple):
    """A client: its process, its user, its groups, and the tenant whose quotas it uses."""

    pid: int
    uid: int
    groups: frozenset[int]
    tenant: str = ""


def peer_at(sock: socket.socket) -> Peer:
    """Return the process that connected, as it was then.

    A process with more than 256 groups counts with its primary group only.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    groups = {gid}
    with contextlib.suppress(OSError):  # ERANGE: more groups
        listed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _MOST_BYTES)
        groups.update(number for (number,) in _GID.iter_unpack(listed))
    return Peer(pid, uid, frozenset(groups))


MIB = 1024 * 1024
HELLO_BYTES = 4096


class ServeLimits(NamedTuple):
    """A client is a process, by the pid that the kernel tells (SO_PEERCRED in unix(7))."""

    connections: int = 256
    connections_per_client: int = 96
    running: int = 128  # running requests, including those that wait for a cell
    running_per_client: int = 64
    # The next three apply where several tenants may connect.
    connections_per_tenant: int = 192
    running_per_tenant: int = 96
    held_bytes_per_tenant: int = 768 * MIB
    request_bytes: int = 65 * MIB  # the longest frame
    held_bytes: int = 1024 * MIB  # bytes of unfinished and running requests
    held_bytes_per_client: int = 512 * MIB
    terminals: int = 64
    terminals_per_client: int = 16
    ports_per_session: int = 16  # ports exposed at once
    hello_seconds: float = 5.0  # until the first frame is complete
    frame_seconds: float = 30.0  # from the first packet of a frame to its last
    idle_seconds: float = 600.0  # between two requests
    reader_seconds: float = 30.0  # until a client has read a frame from the daemon


class ClientQuotas:
    """The daemon's counters for each client: connections, running requests, terminals, and bytes of
    requests."""

    def __init__(self, limits: ServeLimits, *, has_tenants: bool = False) -> None:
        """`has_tenants`: count for each tenant, too."""

        def quota(what: str, per_client: int, total: int, per_tenant: int | None) -> ClientQuota:
            above = [] if per_tenant is None else [QuotaLevel(per_tenant, "tenant", _tenant_of)]
            own = QuotaLevel(per_client, of=_pid_of)
            return ClientQuota(what, own, total, above=above if has_tenants else ())

        self.connections = quota(
            "connections", limits.connections_per_client, limits.connections,
            limits.connections_per_tenant,
        )  # fmt: skip
        self.requests = quota(
            "requests at work", limits.running_per_client, limits.running, limits.running_per_tenant
        )
        self.terminals = quota("terminals", limits.terminals_per_client, limits.terminals, None)
        self.bytes = quota(
            "bytes of requests", limits.held_bytes_per_client, limits.held_bytes,
            limits.held_bytes_per_tenant,
        )  # fmt: skip


def _pid_of(peer: Peer) -> int:
    return peer.pid


def _tenant_of(peer: Peer) -> str:
    return peer.tenant

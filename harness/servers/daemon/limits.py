"""Limits of the daemon's clients, and the quotas that hold them."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from ..client_quota import ClientQuota
from .peers import Peer

MIB = 1024 * 1024
HELLO_BYTES = 4096


class ServeLimits(NamedTuple):
    """A client is a process, by the pid that the kernel tells (SO_PEERCRED in unix(7))."""

    connections: int = 256
    connections_per_client: int = 96
    running: int = 128  # requests at work, including those that wait for a cell
    running_per_client: int = 64
    # The next three apply where several tenants may connect.
    connections_per_tenant: int = 192
    running_per_tenant: int = 96
    held_bytes_per_tenant: int = 768 * MIB
    request_bytes: int = 65 * MIB  # the longest frame
    held_bytes: int = 1024 * MIB  # what requests that are unfinished or at work take
    held_bytes_per_client: int = 512 * MIB
    terminals: int = 64
    terminals_per_client: int = 16
    ports_per_session: int = 16  # those that are exposed at once
    hello_seconds: float = 5.0  # until the first frame is complete
    frame_seconds: float = 30.0  # from the first packet of a frame to its last
    idle_seconds: float = 600.0  # between two requests
    reader_seconds: float = 30.0  # until a client has read a frame from the daemon


class _TenantsQuota:
    """A quota of each client, and one of each tenant where there are several."""

    def __init__(self, what: str, per_client: int, per_tenant: int | None, total: int) -> None:
        self._clients = ClientQuota(what, per_client, total)
        self._tenants = (
            None if per_tenant is None else ClientQuota(what, per_tenant, total, holder="tenant")
        )

    def take(self, peer: Peer, amount: int = 1) -> None:
        """Count `amount` more; raises QuotaExceeded."""
        self._clients.take(peer.pid, amount)
        if self._tenants:
            try:
                self._tenants.take(peer.tenant, amount)
            except BaseException:
                self._clients.give_back(peer.pid, amount)
                raise

    def give_back(self, peer: Peer, amount: int = 1) -> None:
        self._clients.give_back(peer.pid, amount)
        if self._tenants:
            self._tenants.give_back(peer.tenant, amount)

    @contextlib.contextmanager
    def held(self, peer: Peer) -> Iterator[None]:
        self.take(peer)
        try:
            yield
        finally:
            self.give_back(peer)


class ClientQuotas:
    """What the daemon counts for each client: connections, requests at work, terminals, and bytes of
    requests."""

    def __init__(self, limits: ServeLimits, *, has_tenants: bool = False) -> None:
        """`has_tenants`: count for each tenant, too."""

        def shared(per_tenant: int) -> int | None:
            return per_tenant if has_tenants else None

        self.connections = _TenantsQuota(
            "connections", limits.connections_per_client, shared(limits.connections_per_tenant),
            limits.connections,
        )  # fmt: skip
        self.requests = _TenantsQuota(
            "requests at work", limits.running_per_client, shared(limits.running_per_tenant),
            limits.running,
        )  # fmt: skip
        self.terminals = _TenantsQuota(
            "terminals", limits.terminals_per_client, None, limits.terminals
        )
        self.bytes = _TenantsQuota(
            "bytes of requests", limits.held_bytes_per_client, shared(limits.held_bytes_per_tenant),
            limits.held_bytes,
        )  # fmt: skip

"""Limits of the daemon's clients, and the quotas that hold them."""

from typing import NamedTuple

from ..client_quota import ClientQuota

MIB = 1024 * 1024
HELLO_BYTES = 4096


class ServeLimits(NamedTuple):
    """A client is a process, by the pid that the kernel tells (SO_PEERCRED in unix(7))."""

    connections: int = 256
    connections_per_client: int = 96
    running: int = 128  # requests at work, including those that wait for a cell
    running_per_client: int = 64
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


class ClientQuotas:
    """What the daemon counts for each client: connections, requests at work, terminals, and bytes of
    requests."""

    def __init__(self, limits: ServeLimits) -> None:
        self.connections = ClientQuota(
            "connections", limits.connections_per_client, limits.connections
        )
        self.requests = ClientQuota("requests at work", limits.running_per_client, limits.running)
        self.terminals = ClientQuota("terminals", limits.terminals_per_client, limits.terminals)
        self.bytes = ClientQuota(
            "bytes of requests", limits.held_bytes_per_client, limits.held_bytes
        )

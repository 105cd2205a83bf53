"""What is known of servers, and of calls that are under way."""

from typing import NamedTuple

from .config import ServerConfig
from .managed_server import ManagedServer, State
from .pins import Drift


class Progressed(NamedTuple):
    """How far a call has come: `done` of `total`, if that is known, and in words."""

    tool: str
    done: float
    total: float | None
    message: str


class ServerStatus(NamedTuple):
    """What is known of a server now: `tools` can be called, `dropped` cannot, `drift` has to be
    pinned first."""

    name: str
    state: State
    place: str
    sandboxed: bool
    remote: bool
    tools: int
    dropped: tuple[str, ...]
    drift: Drift
    error: str
    starts: int
    protocol: str
    pid: int


def state_of(config: ServerConfig, server: ManagedServer | None) -> State:
    """Return how far a server has come; it has no server before anything was asked of any."""
    if config.disabled:
        return "disabled"
    return server.state if server else "configured"

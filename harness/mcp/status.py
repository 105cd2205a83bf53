"""The state of servers, and the progress of calls, for callers of McpServers."""

from typing import NamedTuple

from .config import ServerConfig
from .managed_server import ManagedServer, State
from .pins import Drift


class Progressed(NamedTuple):
    """Progress of a call: `done` of `total` (None if unknown), and a message."""

    tool: str
    done: float
    total: float | None
    message: str


class ServerStatus(NamedTuple):
    """A server's state: the number of callable `tools`, why others were `dropped`, and `drift` from the
    pins."""

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
    """Return a server's state; `server` is None until the first request to any server."""
    if config.disabled:
        return "disabled"
    return server.state if server else "configured"

"""How servers are started: in a cell, unless their configuration says otherwise."""

from collections.abc import Mapping

from ...policies.errors import LaunchError
from .config import ServerConfig
from .peers import Peer, PlainProcess


def launch_server(config: ServerConfig, env: Mapping[str, str]) -> Peer:
    """Start a server; raises LaunchError."""
    if config.sandboxed:
        raise LaunchError("not yet")
    return PlainProcess(config, env)

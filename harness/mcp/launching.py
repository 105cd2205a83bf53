"""How servers are started: in a cell, unless their configuration says otherwise."""

from collections.abc import Mapping

from .config import ServerConfig
from .processes import Peer, PlainProcess


def launch_server(config: ServerConfig, env: Mapping[str, str]) -> Peer:
    """Start a server; raises LaunchError, and Unenforceable where this host has no cells for it."""
    if not config.sandboxed:
        return PlainProcess(config, env)
    from .cells import CellPeer  # who starts none pays nothing for it

    return CellPeer(config, env)

"""How servers are started: in a cell, unless their configuration says otherwise."""

from collections.abc import Mapping

from .config import ServerConfig
from .processes import HostProcess, ServerProcess


def launch_server(config: ServerConfig, env: Mapping[str, str]) -> ServerProcess:
    """Start a server; raises LaunchError, and Unenforceable where this host has no cells for it."""
    if not config.sandboxed:
        return HostProcess(config, env)
    from .cells import CellProcess  # who starts none pays nothing for it

    return CellProcess(config, env)

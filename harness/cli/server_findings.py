"""What `cellwright doctor` says of servers: which of them nothing confines."""

from urllib.parse import urlsplit

from ..mcp.config import ServerConfig, read_servers
from .verdicts import Finding

_HERE = ("localhost", "127.0.0.1", "::1")


def findings_of(path: str) -> list[Finding]:
    """Look at the servers that a file names, without starting any; raises PolicyError."""
    return [_finding(config) for config in read_servers(path)]


def _finding(config: ServerConfig) -> Finding:
    name = f"server {config.name}"
    if config.disabled:
        return Finding(name, "PASS", "it is disabled", "")
    if config.url:
        return _of_address(name, config)
    if config.sandboxed:
        return Finding(name, "PASS", "it is started in a cell", "")
    said = "sandboxed is false: it runs on the host, and may do what you may"
    return Finding(name, "WARN", said, "leave sandboxed out, and show it what it needs by read")


def _of_address(name: str, config: ServerConfig) -> Finding:
    where = urlsplit(config.url)
    if where.scheme == "https" or where.hostname in _HERE:
        return Finding(name, "PASS", f"it runs elsewhere: {where.hostname}", "")
    said = f"it is reached without encryption: {where.hostname}"
    return Finding(name, "WARN", said, "use https, or its headers can be read on the way")

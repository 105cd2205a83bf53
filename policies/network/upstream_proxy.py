"""`UpstreamProxy`: an HTTP proxy of the host, for connections of cells and requests of tools.

The proxy resolves the names, so addresses cannot be checked: rules then hold by name alone.  No text
here has the password.
"""

import base64
import os
import re
from typing import NamedTuple

from ..errors import PolicyError

ENVIRONMENT = "environment"
_VARIABLES = ("HTTPS_PROXY", "https_proxy")
_MOST_BYTES = 16_384  # bytes of the answer to CONNECT
_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


class ProxyError(Exception):
    """The proxy opens no tunnel; says why."""


class UpstreamProxy(NamedTuple):
    """The address of a proxy, and the value of the header that authorises its use, or empty."""

    host: str
    port: int
    authorization: str = ""

    def __repr__(self) -> str:  # without the password
        return f"UpstreamProxy({self.host!r}, {self.port})"

    @property
    def headers(self) -> dict[str, str]:
        return {"Proxy-Authorization": self.authorization} if self.authorization else {}

    def connect_request(self, host: str, port: int) -> bytes:
        """Return the request for a tunnel (RFC 9110, 9.3.6)."""
        lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def proxy_of(url: str, where: str = "proxy") -> UpstreamProxy:
    """Return the proxy at `url`, `http://[user:password@]host:port`; of "environment", HTTPS_PROXY.

    Raises PolicyError, which says `where` the URL stands.
    """
    from urllib.parse import unquote, urlsplit  # few sandboxes have a proxy

    if url == ENVIRONMENT:
        url = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        if not url:
            raise PolicyError(f"{where}: the variable HTTPS_PROXY is not set")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if not parts or parts.scheme != "http" or not host or not port or parts.path.strip("/"):
        raise PolicyError(f"{where}: must be http://host:port or http://user:password@host:port")
    if parts.username is None:
        return UpstreamProxy(host, port)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return UpstreamProxy(host, port, f"Basic {base64.b64encode(user).decode()}")


def is_open(answer: bytes) -> bool:
    """Tell whether the proxy's answer so far opens the tunnel, False while it is incomplete.

    Raises ProxyError for any other answer.  The server says nothing before its client does, so bytes
    after the answer are an error.
    """
    if not answer.endswith(_END):
        if _END in answer or len(answer) > _MOST_BYTES:
            raise ProxyError("the answer of the proxy is invalid")
        return False
    status = _STATUS.match(answer)
    if not status or status[1] != b"200" or answer.count(_END) > 1:
        raise ProxyError(f"the proxy refused: {status[1].decode() if status else 'not HTTP'}")
    return True

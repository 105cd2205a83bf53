"""`Proxy`: an upstream HTTP proxy of the host, through which requests go if the host says so.

The proxy resolves the names, so that addresses cannot be checked: rules then hold by name alone.
"""

import base64
import os
import re
import socket
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ....policies.errors import PolicyError
from .exchange import CallDeadline, HttpError, send
from .targets import Target

ENVIRONMENT = "environment"
_VARIABLES = ("HTTPS_PROXY", "https_proxy")
_MOST_BYTES = 16_384  # of the answer to CONNECT
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")
_OK = b"200"


class Proxy(NamedTuple):
    """The address of a proxy, and the header that authorises its use."""

    host: str
    port: int
    headers: dict[str, str]

    def __repr__(self) -> str:  # without the password
        return f"Proxy({self.host!r}, {self.port})"


def proxy_of(url: str | None) -> Proxy | None:
    """Return the proxy at `url`, `http://[user:password@]host:port`; of "environment", HTTPS_PROXY.

    Raises PolicyError, without the password.
    """
    if url is None:
        return None
    if url == ENVIRONMENT:
        url = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        if not url:
            raise PolicyError("proxy: the variable HTTPS_PROXY is not set")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if not parts or parts.scheme != "http" or not host or not port or parts.path.strip("/"):
        raise PolicyError("proxy: must be http://host:port or http://user:password@host:port")
    if parts.username is None:
        return Proxy(host, port, {})
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return Proxy(host, port, {"Proxy-Authorization": f"Basic {base64.b64encode(user).decode()}"})


def open_tunnel(sock: socket.socket, proxy: Proxy, target: Target, deadline: CallDeadline) -> None:
    """Have the proxy connect to a target (RFC 9110, 9.3.6); raises HttpError."""
    authority = f"{target.host}:{target.port}"
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
    lines += [f"{name}: {value}" for name, value in proxy.headers.items()]
    send(sock, "\r\n".join([*lines, "", ""]).encode("latin-1"), deadline)
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        # The target says nothing before its client does: more bytes than the answer are an error.
        if b"\r\n\r\n" in answer or len(answer) > _MOST_BYTES:
            raise HttpError("the answer of the proxy is invalid")
        sock.settimeout(deadline.left())
        try:
            part = sock.recv(_MOST_BYTES)
        except OSError as error:
            deadline.left()
            raise HttpError(
                f"the connection to the proxy broke: {error.strerror or error}"
            ) from None
        if not part:
            raise HttpError("the proxy closed the connection")
        answer += part
    status = _STATUS.match(answer)
    if not status or status[1] != _OK:
        raise HttpError(f"the proxy refused: {status[1].decode() if status else 'not HTTP'}")

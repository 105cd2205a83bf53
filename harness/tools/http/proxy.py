"""Tunnels of the HTTP tool through an upstream proxy of the host.

The proxy resolves the names, so that addresses cannot be checked: rules then hold by name alone.
"""

import socket

from ....runner.upstream_proxy import ProxyError, UpstreamProxy, is_open
from .exchange import CallDeadline, HttpError, send
from .targets import Target

_CHUNK_BYTES = 16_384


def open_tunnel(
    sock: socket.socket, proxy: UpstreamProxy, target: Target, deadline: CallDeadline
) -> None:
    """Have the proxy connect to a target; raises HttpError."""
    send(sock, proxy.connect_request(target.host, target.port), deadline)
    answer = b""
    try:
        while not is_open(answer):
            answer += _received(sock, deadline)
    except ProxyError as error:
        raise HttpError(str(error)) from None


def _received(sock: socket.socket, deadline: CallDeadline) -> bytes:
    sock.settimeout(deadline.left())
    try:
        part = sock.recv(_CHUNK_BYTES)
    except OSError as error:
        deadline.left()
        raise HttpError(f"the connection to the proxy broke: {error.strerror or error}") from None
    if not part:
        raise HttpError("the proxy closed the connection")
    return part

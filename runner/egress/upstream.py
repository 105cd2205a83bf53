"""`Upstream`: the way of connections of cells through a proxy of the host, which resolves their names.

No name of a cell is looked up here then, and no address checked: the rules hold by name alone.
"""

import asyncio
import errno
import socket

from ..upstream_proxy import ProxyError, UpstreamProxy, is_open
from .relay import Turns, dial
from .resolving import Resolver

_SECONDS = 15.0
_CHUNK_BYTES = 16_384


class Upstream:
    """Opens tunnels through a proxy."""

    def __init__(self, proxy: UpstreamProxy) -> None:
        self._proxy = proxy
        self._turns = Turns()

    async def connect(
        self, name: str, port: int, resolver: Resolver, seconds: float
    ) -> tuple[socket.socket, str]:
        """Return a socket that leads to `name` through the proxy, and the proxy's address.

        Raises NoAddressError of the proxy's own name, and OSError.
        """
        proxy = self._proxy
        addresses = await resolver.resolve(proxy.host, proxy.port, lambda _: None)
        sock, address = await dial(addresses, proxy.port, seconds)
        try:
            async with asyncio.timeout(_SECONDS):
                await self._open_tunnel(sock, name, port)
        except ProxyError as error:
            sock.close()
            raise OSError(errno.ECONNREFUSED, str(error)) from None
        except BaseException:
            sock.close()
            raise
        return sock, address

    async def _open_tunnel(self, sock: socket.socket, name: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, self._proxy.connect_request(name, port))
        answer = b""
        while not is_open(answer):
            data = await self._turns.receive(sock, _CHUNK_BYTES)
            if not data:
                raise ProxyError("the proxy closed the connection")
            answer += data

"""`Resolver`: the addresses of an allowed name, asked of the host's own resolver and vetted.

A name is resolved once for a connection, after the policy allowed it, and the connection is made to
an address of that one answer.  So no later answer of a name server can lead anywhere else.  Where a
proxy of the host resolves names (`Upstream`), no name of a cell is looked up here and no address
checked: the rules hold by name alone.
"""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...policies.network.upstream_proxy import ProxyError, UpstreamProxy, is_open
from .connection_relay import Turns, dial

Refusal = Callable[[str], str | None]  # returns why an address must not be dialled
# Each cell has threads of its own, because name servers can be slow. There is room for 128 cells.
_THREADS, _THREADS_OF_CELL = 512, 4
STACK_BYTES = 512 * 1024  # stack of a thread; RLIMIT_DATA counts it
_SECONDS = 10.0
_MOST_ADDRESSES = 32


class NoAddressError(Exception):
    """A name has no address that may be dialled."""

    def __init__(self, why: str, *, is_refused: bool = False) -> None:
        super().__init__(why)
        self.is_refused = is_refused  # the name has an address, but the policy does not allow it


class Resolver:
    """Resolves names for one cell, in threads of all cells: getaddrinfo(3) waits."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._free = asyncio.Semaphore(_THREADS_OF_CELL)

    async def resolve(
        self, name: str, port: int, refusal: Refusal
    ) -> list[tuple[socket.AddressFamily, str]]:
        """Return the addresses of `name`; raises NoAddressError if it has none, or one that is refused.

        One refused address is enough to refuse the name: an answer that mixes public and private
        addresses is an attack or a mistake.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                found = await self._found(name, port)
        except TimeoutError:
            raise NoAddressError("resolving took too long") from None
        except OSError as error:
            raise NoAddressError(f"resolving failed: {error.strerror}") from None
        addresses = list(dict.fromkeys(found))[:_MOST_ADDRESSES]
        if not addresses:
            raise NoAddressError("the name has no address")
        for _, address in addresses:
            if why := refusal(address):
                raise NoAddressError(why, is_refused=True)
        return addresses

    async def _found(self, name: str, port: int) -> "list[tuple[socket.AddressFamily, str]]":
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        try:
            asked = self._threads.submit(_ask, name, port)
        except RuntimeError:  # no thread could be started
            self._free.release()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        # A lookup that took too long keeps its thread until it ends; the cell has one thread less
        # meanwhile.
        asked.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(asked)


def resolving_threads() -> ThreadPoolExecutor:
    """Return the threads in which names are resolved for all cells."""
    return ThreadPoolExecutor(_THREADS, "resolve")


def _ask(name: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        (family, str(ipaddress.ip_address(str(address[0]))))  # raises ValueError for a zone's id
        for family, _, _, _, address in answers
        if family in (socket.AF_INET, socket.AF_INET6)
    ]


_PROXY_SECONDS = 15.0
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
            async with asyncio.timeout(_PROXY_SECONDS):
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

"""`Resolver`: the addresses of an allowed name, asked of the host's own resolver and vetted.

A name is resolved once for a connection, after the policy allowed it, and the connection is made to an
address of that one answer.  So no later answer of a name server can lead anywhere else.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Refusal = Callable[[str], str | None]  # why an address must not be dialled
# No cell takes the threads of another, and 128 cells have room: names can have slow name servers.
_THREADS, _THREADS_OF_CELL = 512, 4
_STACK_BYTES = 512 * 1024  # of a thread, which RLIMIT_DATA counts
_SECONDS = 10.0
_MOST_ADDRESSES = 32


class NoAddressError(Exception):
    """A name has no address that may be dialled."""

    def __init__(self, why: str, *, is_refused: bool = False) -> None:
        super().__init__(why)
        self.is_refused = is_refused  # it has one, which the policy does not allow


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
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        # A lookup that took too long keeps its thread until it ends, and the cell has one less.
        asked.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(asked)


def resolving_threads() -> ThreadPoolExecutor:
    """Return the threads in which names are resolved for all cells."""
    threading.stack_size(_STACK_BYTES)
    return ThreadPoolExecutor(_THREADS, "resolve")


def _ask(name: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        (family, str(ipaddress.ip_address(str(address[0]))))  # raises ValueError for a zone's id
        for family, _, _, _, address in answers
        if family in (socket.AF_INET, socket.AF_INET6)
    ]

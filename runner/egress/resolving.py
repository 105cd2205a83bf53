"""`Resolver`: the addresses of an allowed name, asked of the host's own resolver and vetted.

A name is resolved once for a connection, after the policy allowed it, and the connection is made to an
address of that one answer.  So no later answer of a name server can lead anywhere else.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Refusal = Callable[[str], str | None]  # why an address must not be dialled
_THREADS = 8
_SECONDS = 10.0
_MOST_ADDRESSES = 32


class NoAddressError(Exception):
    """A name has no address that may be dialled."""

    def __init__(self, why: str, *, is_refused: bool = False) -> None:
        super().__init__(why)
        self.is_refused = is_refused  # it has one, which the policy does not allow


class Resolver:
    """Resolves names in threads: getaddrinfo(3) waits."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "resolve")

    async def resolve(
        self, name: str, port: int, refusal: Refusal
    ) -> list[tuple[socket.AddressFamily, str]]:
        """Return the addresses of `name`; raises NoAddressError if it has none, or one that is refused.

        One refused address is enough to refuse the name: an answer that mixes public and private
        addresses is an attack or a mistake.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await asyncio.wait_for(
                loop.run_in_executor(self._threads, _ask, name, port), _SECONDS
            )
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


def _ask(name: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        (family, str(ipaddress.ip_address(str(address[0]))))  # raises ValueError for a zone's id
        for family, _, _, _, address in answers
        if family in (socket.AF_INET, socket.AF_INET6)
    ]

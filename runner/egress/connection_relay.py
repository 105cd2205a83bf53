"""`Relay`: one connection of a cell and the connection outside that it was given, byte for byte."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from ...policies.network.canonical import canonical_name
from . import client_hello

_CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("=ii", 1, 0)  # SO_LINGER with no time: close(2) sends a reset
_HELLO_SECONDS = 15.0
_BUFFER_BYTES = 128 * 1024  # the kernel doubles it (socket(7))
_LEFT_MILLISECONDS = 30_000
_MOST_PIECES = 64  # pieces of a ClientHello
_CLOSED = 7  # TCP_CLOSE, the first byte of struct tcp_info (linux/tcp.h, net/tcp_states.h)


class RefusedError(Exception):
    """The connection must not go on; says why."""

    def __init__(self, why: str, *, is_answered: bool = False) -> None:
        super().__init__(why)
        self.is_answered = is_answered  # the program got an answer with the reason


class Turns:
    """Turns of the connections of one cell: in each round of the loop, one of them goes on.

    While bytes are there, sock_recv and sock_sendall return without a wait: a connection that did not
    wait for its turn would keep the process from all other work, and no cancellation would reach it.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # asyncio.Lock is fair: first come, first served

    async def wait(self) -> None:
        async with self._turn:
            await asyncio.sleep(0)

    async def receive(self, sock: socket.socket, size: int) -> bytes:
        """Return bytes of a peer, once there are any and it is the turn of their connection."""
        data = await asyncio.get_running_loop().sock_recv(sock, size)
        await self.wait()
        return data


async def first_bytes(
    guest: socket.socket,
    name: str,
    schemes: Collection[str],
    turns: Turns,
    *,
    any_sni: bool = False,
) -> bytes:
    """Return the first bytes of a client once it is clear that they speak one of `schemes`, "https" or
    "http", and over TLS ask for the server `name`, or with `any_sni` for any; raises RefusedError.

    They decide before any lookup or connection outside.
    """
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            data = await turns.receive(guest, _CHUNK_BYTES)
            if not data:
                raise RefusedError("ended before its first byte")
            if not client_hello.begins_tls(data):
                if "http" not in schemes:
                    raise RefusedError("not TLS")
                return data
            if "https" not in schemes:
                raise RefusedError("TLS, which no rule allows")
            pieces = 1
            while (hello := client_hello.parse(data)) is None:
                pieces += 1  # everything is parsed again for each piece
                if pieces > _MOST_PIECES:
                    raise RefusedError("the ClientHello came in too many pieces")
                more = await turns.receive(guest, _CHUNK_BYTES)
                if not more:
                    raise RefusedError("the ClientHello is incomplete")
                data += more
    except client_hello.HelloError as error:
        raise RefusedError(f"the ClientHello is invalid: {error}") from None
    except TimeoutError:
        raise RefusedError(f"no first bytes within {_HELLO_SECONDS:g} s") from None
    if not any_sni:
        _require_name(hello, name)
    return data


def _require_name(hello: client_hello.ClientHello, name: str) -> None:
    if hello.is_encrypted:
        raise RefusedError("the server name is encrypted (ECH)")
    if hello.server_name is None:
        raise RefusedError("no server name (SNI)")
    try:
        asked = canonical_name(hello.server_name)
    except ValueError:
        asked = ""
    if asked != name:
        raise RefusedError(f"the server name (SNI) is {hello.server_name[:253]!r}")


class Stream(Protocol):
    """One end of a connection, in clear text or by TLS."""

    scheme: str

    async def handshake(self) -> None:
        """Agree with the peer, before anything else; raises OSError."""

    async def receive(self, size: int) -> bytes:
        """Return bytes of the peer, empty at its end; raises OSError."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`; raises OSError."""

    async def end(self) -> None:
        """Tell the peer that nothing more comes; raises OSError."""


class PlainStream:
    """A socket."""

    scheme = "http"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def handshake(self) -> None:
        """Do nothing."""

    async def receive(self, size: int) -> bytes:
        return await self._loop.sock_recv(self._sock, size)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def end(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)


class Relay:
    """Copies both directions until both have ended, and counts the bytes.

    Each direction reads only after its last bytes were taken, so a slow reader slows the writer down,
    and passes the end of a stream on.
    """

    def __init__(
        self, guest: socket.socket, outside: socket.socket, first: bytes,
        on_bytes: Callable[[int, int], None], turns: Turns, on_sent: Callable[[bytes], object] = bytes,
    ) -> None:  # fmt: skip
        """`first` was read from `guest` already. `on_bytes` is called with the numbers of sent and
        received bytes before they are passed on, `on_sent` with those that are sent."""
        self._guest = guest
        self._outside = outside
        self._first = first
        self._on_bytes = on_bytes
        self._on_sent = on_sent
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self.sent_bytes = self.received_bytes = 0
        # everything that the guest sent is uploaded, and its stream has ended
        self.is_uploaded = False
        self.used_at = time.monotonic()

    async def run(self, uploaded: asyncio.Event) -> None:
        """Copy until both directions have ended; raises OSError and what `on_bytes` raises."""
        tasks = [
            asyncio.create_task(self._upload(uploaded)),
            asyncio.create_task(self._copy(self._outside, self._guest, self._count_received)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _upload(self, uploaded: asyncio.Event) -> None:
        try:
            if self._first:
                await self._pass(self._first, self._outside, self._count_sent)
            await self._copy(self._guest, self._outside, self._count_sent)
            self.is_uploaded = True
        finally:
            uploaded.set()

    async def _copy(
        self, source: socket.socket, target: socket.socket, count: Callable[[bytes], None]
    ) -> None:
        while data := await self._turns.receive(source, _CHUNK_BYTES):
            await self._pass(data, target, count)
        with contextlib.suppress(OSError):  # the peer may have closed both directions meanwhile
            target.shutdown(socket.SHUT_WR)

    async def _pass(
        self, data: bytes, target: socket.socket, count: Callable[[bytes], None]
    ) -> None:
        self.used_at = time.monotonic()
        count(data)
        await self._loop.sock_sendall(target, data)
        self.used_at = time.monotonic()

    def why_not_now(self) -> str:
        """Nothing has been read since the first bytes, so the decision about them still holds."""
        return ""

    def _count_sent(self, data: bytes) -> None:
        self._on_bytes(len(data), 0)
        self.sent_bytes += len(data)
        self._on_sent(data)

    def _count_received(self, data: bytes) -> None:
        self._on_bytes(0, len(data))
        self.received_bytes += len(data)


def reset(sock: socket.socket) -> None:
    """Close a connection so that its peer gets a reset, and not the end of a stream."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def was_reset(sock: socket.socket) -> bool:
    """Tell whether the peer of an open socket reset the connection.  A program does that too when it
    closes one before it has read all: OpenSSL's clients do not wait for the server's close_notify."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED


def leave(sock: socket.socket) -> None:
    """Close a connection. Its unsent bytes still go out, unless the peer reads nothing for long.

    The kernel would keep megabytes of it for minutes (tcp_orphan_retries, tcp(7)).
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LEFT_MILLISECONDS)
    sock.close()


def limit_buffers(*sockets: socket.socket) -> None:
    """Keep the kernel from enlarging buffers, which it does up to tcp_wmem and tcp_rmem (tcp(7)): they
    are memory of the host that no cgroup of a cell counts."""
    for sock in sockets:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


async def dial(
    addresses: list[tuple[socket.AddressFamily, str]], port: int, seconds: float
) -> tuple[socket.socket, str]:
    """Connect to the first of `addresses` that answers; return the socket and that address.

    Raises OSError of the last one.
    """
    last: OSError = OSError("no address")
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            connecting: Awaitable[None] = asyncio.get_running_loop().sock_connect(
                sock, (address, port)
            )
            await asyncio.wait_for(connecting, seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock, address
        except OSError as error:  # includes TimeoutError
            last = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise last

"""`TlsStream`: the bytes of one connection by TLS, on two buffers in memory (ssl.SSLObject), so that
all waiting stays with the event loop.

`TlsContexts`: the certificate that programs are shown, and the verification of real servers.
"""

import asyncio
import contextlib
import os
import socket
import ssl

from ...policies.network.credential import EgressSecrets
from .connection_relay import Turns

_CHUNK_BYTES = 64 * 1024
_HANDSHAKE_SECONDS = 15.0
_END_SECONDS = 1.0
_ALPN = ["http/1.1"]  # HTTP/2 is not read


class TlsStream:
    """TLS on a socket; `name` is the server to ask for, empty where this end is the server."""

    scheme = "https"

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, turns: Turns, name: str = "",
        first: bytes = b"",
    ) -> None:  # fmt: skip
        """`first` was read from `sock` already."""
        self._sock = sock
        self._turns = turns
        self._is_server = not name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not name, server_hostname=name or None
        )
        self._incoming.write(first)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()  # records must go out in the order in which they were made

    async def handshake(self) -> None:
        """Agree on keys, and verify the server; raises OSError, also for a refused certificate."""
        async with asyncio.timeout(_HANDSHAKE_SECONDS):
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError:
                    with contextlib.suppress(OSError):
                        await self._flush()  # the alert
                    raise
                else:
                    return await self._flush()

    async def receive(self, size: int) -> bytes:
        while True:
            try:
                return self._read(size)
            except ssl.SSLWantReadError:
                await self._flush()  # answers of TLS itself, such as new keys
                await self._fill()
            except ssl.SSLEOFError:
                if self._is_server:  # a program may end as it likes
                    return b""
                raise  # without close_notify it may be cut off

    def _read(self, size: int) -> bytes:
        """Return what has come; one read is of one record, with 16 KiB at most."""
        data = self._tls.read(size)
        with contextlib.suppress(ssl.SSLError):  # the next call raises it again
            while data and len(data) < size and (more := self._tls.read(size - len(data))):
                data += more
        return data

    async def send(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def end(self) -> None:
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):  # includes TimeoutError
            async with asyncio.timeout(_END_SECONDS):
                await self._flush()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def _fill(self) -> None:
        if data := await self._turns.receive(self._sock, _CHUNK_BYTES):
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._outgoing.read():
                await self._loop.sock_sendall(self._sock, data)


class TlsContexts:
    """The two sides of TLS for hosts with credentials: the server that programs reach, and the client
    of the real server, which it verifies."""

    def __init__(self, secrets: EgressSecrets) -> None:
        """Read the files; raises OSError."""
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for each in (self.server, self.client):
            each.minimum_version = ssl.TLSVersion.TLSv1_2
            each.set_alpn_protocols(_ALPN)
            each.options |= ssl.OP_NO_RENEGOTIATION
        self.client.load_verify_locations(secrets.trusted)
        chain = os.memfd_create("certificate", os.MFD_CLOEXEC)  # ssl reads keys from files alone
        try:
            os.write(chain, secrets.certificate)
            self.server.load_cert_chain(f"/proc/self/fd/{chain}")
        finally:
            os.close(chain)

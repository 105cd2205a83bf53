"""Requests that are passed on to a server in a cell; its answers are bounded and not decoded.

A relayed request takes no thread, and ends with the client's: neither a server that never answers nor
one that sends headers without end takes anything from another client.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.responses import Response, StreamingResponse

from ....runner.egress.http_relay import h11
from ..http_server import Scope, drop

_CHUNK, _HEADER_BYTES = 64 * 1024, 64 * 1024
_HEADER_SECONDS, _IDLE_SECONDS = 120.0, 300.0  # for the head of an answer, and between its parts
_ANSWER_BYTES = 4 * 1024 * 1024 * 1024
_MOST_INTERIM = 8  # answers such as 100 Continue, before the answer
# Passed on; all others are between two neighbours, or about the client's access.
_REQUEST_HEADERS = (
    "accept", "connect-protocol-version", "connect-timeout-ms", "content-encoding", "content-type",
    "cookie", "keepalive-ping-interval", "range",
)  # fmt: skip
_METADATA = "x-metadata-"  # of files
_ANSWER_HEADERS = (
    b"content-type",
    b"content-range",
    b"etag",
    b"last-modified",
    b"location",
    b"set-cookie",
)


class _CellConnection:
    """A connection to a server in a cell, for one request."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADER_BYTES)
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, path: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> h11.Response:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        given = [("Host", "cell"), ("Connection", "close"), *headers.items()]
        if body or method in ("POST", "PUT", "PATCH"):
            given.append(("Content-Length", str(len(body))))
        parts = [h11.Request(method=method, target=target, headers=given), h11.Data(data=body)]
        for each in (*parts, h11.EndOfMessage()):
            self._writer.write(self._http.send(each) or b"")
        await self._writer.drain()
        for _ in range(_MOST_INTERIM):
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
        raise h11.RemoteProtocolError("no answer")

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def body(self) -> AsyncGenerator[bytes]:
        """Yield the body of the answer; raises OSError or h11.RemoteProtocolError if it is cut off."""
        while True:
            async with asyncio.timeout(_IDLE_SECONDS):
                event = await self._next()
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


async def relayed(
    path: str, method: str, target: str, headers: Mapping[str, str], body: bytes, scope: Scope
) -> Response:
    """Return the answer of the server that listens at a Unix socket.

    Its status and a few headers are passed on, and its body as it comes.  Status 502 says that no
    server answers, or that it redirects to another host: clients would take their token there.
    """
    connection = _CellConnection()
    given = {
        name: value for name, value in headers.items()
        if name in _REQUEST_HEADERS or name.startswith(_METADATA)
    }  # fmt: skip
    try:
        async with asyncio.timeout(_HEADER_SECONDS):  # also of a server that sends a byte at a time
            answer = await connection.ask(path, method, target, given, body)
    except (OSError, h11.ProtocolError, ValueError):
        connection.end()
        return Response("the port is not open in the sandbox\n", 502)
    except BaseException:
        connection.end()
        raise
    kept: dict[str, str] = {}
    for name, value in answer.headers:
        text = value.decode("latin-1")
        if name in _ANSWER_HEADERS and text.isprintable():
            kept.setdefault(name.decode(), text)
    if not _stays(kept.get("location", "/")):
        connection.end()
        return Response("the server redirects to another host\n", 502)
    status = answer.status_code if 200 <= answer.status_code <= 599 else 502
    return StreamingResponse(_body(connection, scope), status, kept)


def _stays(location: str) -> bool:
    """Tell whether `location` is a path of the same server, for browsers too: they read \\ as /."""
    return location.startswith("/") and not location.startswith("//") and "\\" not in location


async def _body(connection: _CellConnection, scope: Scope) -> AsyncIterator[bytes]:
    left = _ANSWER_BYTES
    try:
        async with contextlib.aclosing(connection.body()) as parts:
            async for data in parts:
                yield data
                if (left := left - len(data)) <= 0:
                    break
    except (OSError, h11.ProtocolError):
        drop(
            scope
        )  # the cell has ended, or the answer is malformed: the client must not take it for whole
    finally:
        connection.end()

"""Requests that are passed on to a server in a cell; its answers are bounded and not decoded."""

import contextlib
import http.client
import socket
from collections.abc import AsyncIterator, Mapping

import anyio
from starlette.responses import Response, StreamingResponse

_CHUNK = 64 * 1024
_STREAMS = anyio.CapacityLimiter(512)  # threads, one for each answer that is being read
_HEADER_SECONDS, _IDLE_SECONDS = 120.0, 300.0  # for the head of an answer, and between its parts
_ANSWER_BYTES = 4 * 1024 * 1024 * 1024
# Passed on; all others are between two neighbours, or about the client's access.
_REQUEST_HEADERS = (
    "accept", "connect-protocol-version", "connect-timeout-ms", "content-encoding", "content-type",
    "cookie", "keepalive-ping-interval", "range",
)  # fmt: skip
_ANSWER_HEADERS = (
    "content-type",
    "content-range",
    "etag",
    "last-modified",
    "location",
    "set-cookie",
)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("cell")
        self._path = path
        # http.client forgets its own once an answer says that the connection ends with it.
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_HEADER_SECONDS)

    def connect(self) -> None:
        self.sock = self._socket
        self.sock.connect(self._path)

    def is_answered(self) -> None:
        """Wait longer from now on: the rest comes as a program writes it."""
        self._socket.settimeout(_IDLE_SECONDS)

    def end(self) -> None:
        """End the connection and close its descriptor, which no other thread uses by then."""
        self.hang_up()
        self._socket.close()

    def hang_up(self) -> None:
        """End a read of another thread, and the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


async def relayed(
    path: str, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> Response:
    """Return the answer of the server that listens at a Unix socket.

    Its status and a few headers are passed on, and its body as it comes.  Status 502 says that no
    server answers, or that it redirects to another host: clients would take their token there.
    """
    connection = _UnixConnection(path)
    given = {name: headers[name] for name in _REQUEST_HEADERS if name in headers}

    def ask() -> http.client.HTTPResponse:
        connection.request(method, target, body or None, {**given, "Connection": "close"})
        answer = connection.getresponse()
        connection.is_answered()
        return answer

    try:
        with anyio.fail_after(_HEADER_SECONDS):  # also of a server that sends a byte at a time
            answer = await anyio.to_thread.run_sync(ask, limiter=_STREAMS, abandon_on_cancel=True)
    except (OSError, http.client.HTTPException, ValueError):
        connection.hang_up()
        connection.close()
        return Response("the port is not open in the sandbox\n", 502)
    except BaseException:
        connection.hang_up()
        raise
    kept = {
        name: value for name in _ANSWER_HEADERS if (value := answer.getheader(name)) is not None
    }
    kept = {name: value for name, value in kept.items() if value.isprintable()}
    if not _stays(kept.get("location", "/")):
        answer.close()
        connection.end()
        return Response("the server redirects to another host\n", 502)
    status = answer.status if 200 <= answer.status <= 599 else 502
    return StreamingResponse(_body(connection, answer), status, kept)


def _stays(location: str) -> bool:
    """Tell whether `location` is a path of the same server, for browsers too: they read \\ as /."""
    return location.startswith("/") and not location.startswith("//") and "\\" not in location


async def _body(
    connection: _UnixConnection, answer: http.client.HTTPResponse
) -> AsyncIterator[bytes]:
    left = _ANSWER_BYTES
    try:
        while left > 0:
            data = await anyio.to_thread.run_sync(
                lambda: answer.read1(_CHUNK), limiter=_STREAMS, abandon_on_cancel=True
            )
            if not data:
                break
            left -= len(data)
            yield data
    except (OSError, http.client.HTTPException, ValueError):
        pass  # the cell has ended, or says nonsense: the answer ends here
    except BaseException:
        connection.hang_up()  # a thread may still read, so its descriptor stays
        raise
    answer.close()
    connection.end()

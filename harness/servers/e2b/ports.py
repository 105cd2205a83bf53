"""The ports of a sandbox: its code contexts, which the host answers, and servers in its cell.

A request to a server in the cell is passed on, and its answer is bounded and not decoded.  A relayed
request takes no thread, and ends with the client's: neither a server that never answers nor one that
sends headers without end takes anything from another client.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....runner.egress.http_relay import h11
from ..http_server import Scope, drop
from . import access
from .code_interpreter import CodeContext
from .control_messages import ExecuteCode, NewContext
from .e2b_cell import ENVD_PORT
from .e2b_sandboxes import E2bSandbox, E2bSandboxes


def _reached(request: Request, sandboxes: E2bSandboxes) -> E2bSandbox:
    id = request.headers.get(access.SANDBOX_HEADER.decode(), "")
    found = sandboxes.find(id)
    token = request.headers["authorization"].partition(" ")[2]
    if found is None or sandboxes.with_token(token) is not found:
        raise access.E2bRefusal(502, "The sandbox was not found")  # as E2B's proxy says it
    resume = found.request.auto_resume
    if found.is_paused and resume and resume.enabled:
        sandboxes.resume(found, found.request.timeout)
    if found.is_paused:
        raise access.E2bRefusal(502, "The sandbox is paused and was not found: connect to it first")
    return found


async def of_port(request: Request, sandboxes: E2bSandboxes) -> Response:
    """Pass a request on to a server in the cell."""
    sandbox, port = _reached(request, sandboxes), access.port_of(request.scope)
    if not 0 < port < 65536:
        raise access.E2bRefusal(400, f"port {port}: must be from 1 to 65535")
    query = request.scope["query_string"].decode("latin-1")
    target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    body = await access.body_of(
        request, access.MOST_CALL if access.is_stream(request.scope) else access.MOST_BODY
    )
    if port == ENVD_PORT:
        seconds = access.number_of(request.headers.get("connect-timeout-ms"), 0) / 1000 or None
        home = sandbox.cell.home
        if answer := await sandbox.terminals.answer(request.url.path, body, home, seconds):
            return answer
    path = sandbox.cell.address_of(port)
    return await relayed(path, request.method, target, request.headers, body, request.scope)


async def _execute(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _reached(request, sandboxes), await access.read_body(request, ExecuteCode)
    context = sandbox.code.context_of(given)

    async def lines() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(sandbox.code.run(context, given)) as told:
            async for line in told:
                yield line
        if sandbox.code.is_killed:
            drop(request.scope)  # so that the client sees that the answer is not whole

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _contexts(request: Request, sandboxes: E2bSandboxes) -> Response:
    return access.json_answer(_reached(request, sandboxes).code.contexts())


async def _make_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _reached(request, sandboxes), await access.read_body(request, NewContext)
    return access.json_answer(sandbox.code.make(given.language, given.cwd).told())


def _context(request: Request, sandbox: E2bSandbox) -> CodeContext:
    found = sandbox.code.find(request.path_params["id"])
    if found is None:
        raise access.E2bRefusal(404, f"context {request.path_params['id'][:64]} not found")
    return found


async def _remove_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _reached(request, sandboxes)
    await sandbox.code.forget(_context(request, sandbox), is_removed=True)
    return Response(status_code=204)


async def _restart_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _reached(request, sandboxes)
    await sandbox.code.forget(_context(request, sandbox), is_removed=False)
    return Response(status_code=204)


CODE: dict[tuple[str, str], access.Handler] = {
    ("POST", "/execute"): _execute,
    ("GET", "/contexts"): _contexts,
    ("POST", "/contexts"): _make_context,
    ("DELETE", "/contexts/{id}"): _remove_context,
    ("POST", "/contexts/{id}/restart"): _restart_context,
}


_CHUNK, _HEADER_BYTES = 64 * 1024, 64 * 1024
_HEADER_SECONDS, _IDLE_SECONDS = 120.0, 300.0  # for the head of an answer, and between its parts
_ANSWER_BYTES = 4 * 1024 * 1024 * 1024
_MOST_INTERIM = 8  # answers such as 100 Continue, before the answer
# Headers that are passed on. All others are hop-by-hop, or about the client's access.
_REQUEST_HEADERS = (
    "accept", "connect-protocol-version", "connect-timeout-ms", "content-encoding", "content-type",
    "cookie", "keepalive-ping-interval", "range",
)  # fmt: skip
_METADATA = "x-metadata-"  # prefix of headers about files
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

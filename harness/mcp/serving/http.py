"""The protocol over HTTP: who is let in, and what is told of those who go away."""

import contextlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import anyio
import uvicorn
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import Response

from .owners import CLIENT, owner_id
from .pipes import LINE_BYTES
from .tokens import Tokens
from .weights import Weights
from .work import GONE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH = "/mcp"
_MOST_CONNECTIONS = 1000
_MOST_CONVERSATIONS = 256
_IDLE_SECONDS = 1800.0  # of a conversation
_SESSION = b"mcp-session-id"


class Door:
    """Lets in who has a token; what stands behind learns from it whose each request is."""

    def __init__(self, app: App, tokens: Tokens, on_end: Callable[[str], None]) -> None:
        self._app = app
        self._tokens = tokens
        self._on_end = on_end
        self._weights = Weights()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with 401 before a byte of its body is read, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the lifespan; there are no websockets
            return
        client = self._tokens.client_of(_header(scope, b"authorization"))
        if client is None:
            refusal = Response("a token is needed\n", 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        with self._weights.held(client, _length(scope)) as fits:
            if not fits:
                await Response("too much is asked at once\n", 503)(scope, receive, send)
                return
            gone = anyio.Event()
            scope.update({CLIENT: client, GONE: gone, "user": _user(client)})
            await self._app(scope, _heard(receive, gone), self._watched(scope, send))

    def _watched(self, scope: Scope, send: Send) -> Send:
        """Have a conversation that its client has ended be forgotten here too."""
        session = _header(scope, _SESSION)

        async def watch(message: Message) -> None:
            ended = scope["method"] == "DELETE" and message.get("status") == 200
            if ended and message["type"] == "http.response.start" and session:
                await anyio.to_thread.run_sync(self._on_end, owner_id(scope[CLIENT], session))
            await send(message)

        return watch


def _user(client: str) -> AuthenticatedUser:
    """Return the client as the SDK knows it, which binds its conversations to who began them."""
    return AuthenticatedUser(AccessToken(token="", client_id=client, scopes=[]))


def _heard(receive: Receive, gone: anyio.Event) -> Receive:
    async def hear() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            gone.set()
        return message

    return hear


def _header(scope: Scope, name: bytes) -> str:
    """Return a header, empty if it is not there, or there twice."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _length(scope: Scope) -> int:
    """Return how long a body is; one that does not say may be as long as any."""
    told = [value for key, value in scope["headers"] if key == b"content-length"]
    if any(key == b"transfer-encoding" for key, _ in scope["headers"]):  # that counts, with both
        return LINE_BYTES
    return min(int(told[0]), LINE_BYTES) if told else 0  # a longer one is refused before it is read


def app_of(
    server: Server[Any], tokens: Tokens, hosts: Sequence[str], origins: Sequence[str],
    on_end: Callable[[str], None],
) -> App:  # fmt: skip
    """Return all of it.  `hosts` are the names that clients may call us by, `origins` those of web
    pages that may; one that has another name resolve to us (DNS rebinding) is refused by its Host."""
    app = server.streamable_http_app(
        streamable_http_path=PATH, max_request_body_size=LINE_BYTES,
        max_sessions=_MOST_CONVERSATIONS, session_idle_timeout=_IDLE_SECONDS,
        transport_security=TransportSecuritySettings(
            allowed_hosts=[*hosts, *(f"{host}:*" for host in hosts)], allowed_origins=list(origins)
        ),
    )  # fmt: skip
    return Door(app, tokens, on_end)


async def serve_http(app: App, listener: socket.socket, ending: anyio.Event) -> None:
    """Serve until it is time to end; what runs then has a second."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, limit_concurrency=_MOST_CONNECTIONS, ws="none",
        timeout_graceful_shutdown=1, lifespan="on", server_header=False,
        http="h11",  # whatever else is installed: its headers are bounded
    )  # fmt: skip
    server = _Server(config)

    async def end() -> None:
        await ending.wait()
        server.should_exit = True

    async with anyio.create_task_group() as beside:
        beside.start_soon(end)
        await server.serve([listener])
        beside.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)

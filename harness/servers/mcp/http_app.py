"""The HTTP application: the SDK's own behind the checks of access, with limits to conversations."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import Response

from ..http_access import AccessLimits, AccessMiddleware, header, own_origins, read_ahead
from ..http_server import App, Message, Receive, Scope, Send
from ..tokens import CLIENT, Tokens
from .clients import owner_id
from .stdio import LINE_BYTES

PATH = "/mcp"
_LIMITS = AccessLimits(body_bytes=LINE_BYTES)
_MOST_CONVERSATIONS = 256
_IDLE_SECONDS = 1800.0  # of a conversation
_SESSION = b"mcp-session-id"


class ConversationMiddleware:
    """ASGI middleware that checks a body's decoded size, names the client for the SDK, and ends a
    conversation's sessions with the conversation."""

    def __init__(self, app: App, on_end: Callable[[str], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["user"] = _user(scope[CLIENT])
        scope["headers"] = _without_own_origin(scope["headers"])
        try:
            body = await read_ahead(scope, receive, LINE_BYTES)
        except msgspec.DecodeError as error:
            await Response(f"the body is not read: {error}\n", 400)(scope, receive, send)
            return
        await self._app(scope, body, self._watched(scope, send))

    def _watched(self, scope: Scope, send: Send) -> Send:
        """Return `send` that also ends a conversation's sessions when its client ends the
        conversation."""
        session = header(scope, _SESSION)

        async def watch(message: Message) -> None:
            ended = scope["method"] == "DELETE" and message.get("status") == 200
            if ended and message["type"] == "http.response.start" and session:
                await anyio.to_thread.run_sync(self._on_end, owner_id(scope[CLIENT], session))
            await send(message)

        return watch


def _user(client: str) -> AuthenticatedUser:
    """Return the client for the SDK, which binds a conversation to the client that began it."""
    return AuthenticatedUser(AccessToken(token="", client_id=client, scopes=[]))


def _without_own_origin(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leave out an Origin that equals the host and port that the request was sent to.

    Such a request is from our own page.  The Host itself is checked after this, so a foreign name that
    resolves to us (DNS rebinding) gains nothing.
    """
    given = dict(headers)
    if given.get(b"origin") not in own_origins(given):
        return headers
    return [each for each in headers if each[0] != b"origin"]


def app_of(
    server: Server[Any], tokens: Tokens, hosts: Sequence[str], origins: Sequence[str],
    on_end: Callable[[str], None],
) -> App:  # fmt: skip
    """Return the whole application.  `hosts` are the allowed names of this server in Host, which stops
    DNS rebinding; `origins` are the allowed origins of web pages."""
    app = server.streamable_http_app(
        streamable_http_path=PATH, max_request_body_size=LINE_BYTES,
        max_sessions=_MOST_CONVERSATIONS, session_idle_timeout=_IDLE_SECONDS,
        transport_security=TransportSecuritySettings(
            allowed_hosts=[*hosts, *(f"{host}:*" for host in hosts)], allowed_origins=list(origins)
        ),
    )  # fmt: skip
    return AccessMiddleware(ConversationMiddleware(app, on_end), tokens, _LIMITS, [_SESSION])

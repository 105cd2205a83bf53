"""The HTTP application: the SDK's own behind the checks of access, with limits to conversations."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import msgspec
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.responses import Response

from ....policies.errors import BusyError
from ..http_access import AccessLimits, AccessMiddleware, header, read_ahead
from ..http_server import App, Message, Receive, Scope, Send
from ..tokens import CLIENT, GONE, Tokens
from ..web.site_checks import SiteChecks
from .clients import owner_id
from .conversations import IDLE_SECONDS, MOST, ClientConversation, Conversations
from .stdio import LINE_BYTES
from .stream_events import READER, RETRY_MILLISECONDS, EventReader, KeptEvents

PATH = "/mcp"
_LIMITS = AccessLimits(body_bytes=LINE_BYTES)
_SESSION, _VERSION = b"mcp-session-id", b"mcp-protocol-version"


class ConversationMiddleware:
    """ASGI middleware that checks a body's decoded size, names the client for the SDK, and counts
    conversations."""

    def __init__(self, app: App, conversations: Conversations) -> None:
        self._app = app
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["user"] = _user(scope[CLIENT])
        with contextlib.ExitStack() as used:
            try:
                conversation = used.enter_context(self._used(scope))
                body = await read_ahead(scope, receive, LINE_BYTES)
            except BusyError as error:
                await Response(f"{error}\n", 503)(scope, receive, send)
                return
            except msgspec.DecodeError as error:
                await Response(f"the body is not read: {error}\n", 400)(scope, receive, send)
                return
            if conversation:
                send = self._watched(scope, send, conversation)
            if scope["method"] == "GET" and (reader := READER.get()):
                body, send = _until_last_event(reader, body, send)
            await self._app(scope, body, send)

    @contextlib.contextmanager
    def _used(self, scope: Scope) -> Iterator[ClientConversation | None]:
        """Count a request of a conversation during the block; None for a request without one."""
        version = header(scope, _VERSION)
        is_modern = bool(version) and version not in HANDSHAKE_PROTOCOL_VERSIONS
        if is_modern or scope["path"] != PATH:
            yield None
            return
        client, id, gone = scope[CLIENT], header(scope, _SESSION), scope[GONE]
        with self._conversations.used(client, id, gone) as conversation:
            yield conversation

    def _watched(self, scope: Scope, send: Send, conversation: ClientConversation) -> Send:
        """Return `send` that also notes how the SDK began or ended a conversation."""

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                status, id = message["status"], dict(message["headers"]).get(_SESSION, b"")
                if not conversation.id and id and status < 400:
                    self._conversations.keep(conversation, id.decode("latin-1"))
                elif status == 404 or (scope["method"] == "DELETE" and status == 200):
                    await self._conversations.end(conversation)
            await send(message)

        return watch


def _until_last_event(reader: EventReader, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Return `receive` and `send` that end an answer with the last event of the stream that it resumes:
    the SDK would keep it open."""
    over = anyio.Event()

    async def hear() -> Message:
        message: Message = {"type": "http.disconnect"}
        async with anyio.create_task_group() as group:

            async def real() -> None:
                nonlocal message
                message = await receive()
                group.cancel_scope.cancel()

            group.start_soon(real)
            await over.wait()
            group.cancel_scope.cancel()
        return message

    async def tell(message: Message) -> None:
        if over.is_set():
            return
        if reader.last and reader.last.encode() in message.get("body", b""):
            message = {**message, "more_body": False}
            over.set()
        await send(message)

    return hear, tell


def _user(client: str) -> AuthenticatedUser:
    """Return the client for the SDK, which binds a conversation to the client that began it."""
    return AuthenticatedUser(AccessToken(token="", client_id=client, scopes=[]))


def app_of(
    server: Server[Any], tokens: Tokens, hosts: Sequence[str], origins: Sequence[str],
    on_end: Callable[[str], None],
) -> App:  # fmt: skip
    """Return the whole application.  `hosts` are the allowed names of this server in Host, which stops
    DNS rebinding; `origins` are the allowed origins of web pages."""
    app = server.streamable_http_app(
        streamable_http_path=PATH, max_request_body_size=LINE_BYTES,
        max_sessions=MOST, session_idle_timeout=IDLE_SECONDS,
        event_store=KeptEvents(), retry_interval=RETRY_MILLISECONDS,
        # SiteChecks does it: the SDK's own takes a name with anything behind a colon for its port.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )  # fmt: skip
    conversations = Conversations(lambda client, id: on_end(owner_id(client, id)))
    once = [_SESSION, _VERSION]
    known = AccessMiddleware(ConversationMiddleware(app, conversations), tokens, _LIMITS, once)
    return SiteChecks(known, hosts, origins)

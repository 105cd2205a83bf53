"""The HTTP application: authentication, limits, and detection of clients that disconnect."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import Response

from ....policies.errors import BusyError
from ....runner.nesting import decoded_bytes, refuse_expansion
from ..client_quota import ClientQuota
from .clients import CLIENT, owner_id
from .http_server import MOST_CONNECTIONS, App, Message, Receive, Scope, Send, admit
from .request_threads import GONE
from .stdio import LINE_BYTES
from .tokens import Tokens

PATH = "/mcp"
_REQUESTS_PER_CLIENT = MOST_CONNECTIONS * 3 // 4  # some connections are left for other clients
_BODY_BYTES_PER_CLIENT, _BODY_BYTES = 128 * 1024 * 1024, 256 * 1024 * 1024
_BODY_SECONDS = 60.0  # from the header of a request to the last byte of its body
_MOST_CONVERSATIONS = 256
_IDLE_SECONDS = 1800.0  # of a conversation
_SESSION = b"mcp-session-id"
_ONCE = (
    b"authorization",
    b"host",
    b"origin",
    b"mcp-session-id",
)  # a proxy and we could each read another one


class AccessMiddleware:
    """ASGI middleware that admits requests with a valid token and passes the client's name on."""

    def __init__(self, app: App, tokens: Tokens, on_end: Callable[[str], None]) -> None:
        self._app = app
        self._tokens = tokens
        self._on_end = on_end
        self._bodies = ClientQuota("bytes of bodies", _BODY_BYTES_PER_CLIENT, _BODY_BYTES)
        self._requests = ClientQuota("unanswered requests", _REQUESTS_PER_CLIENT, MOST_CONNECTIONS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before a byte of its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # lifespan; there are no websockets
            return
        client = self._tokens.client_of(_header(scope, b"authorization"))
        if client is None:
            refusal = Response("a token is required\n", 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
        elif twice := _duplicate_header(scope):
            await Response(f"duplicate header {twice}\n", 400)(scope, receive, send)
        else:
            await self._admit(client, scope, receive, send)

    async def _admit(self, client: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a client's request on if the client stays within its quotas, else answer 503."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._requests.held(client))
                held.enter_context(self._bodies.held(client, _length(scope)))
            except BusyError as error:
                await Response(f"{error.what}\n", 503)(scope, receive, send)
                return
            admit(scope)
            gone = anyio.Event()
            scope.update({CLIENT: client, GONE: gone, "user": _user(client)})
            scope["headers"] = _without_own_origin(scope["headers"])
            try:
                body = await _checked(scope, _with_deadline(receive, gone))
            except msgspec.DecodeError as error:
                await Response(f"the body is not read: {error}\n", 400)(scope, receive, send)
                return
            await self._app(scope, body, self._watched(scope, send))

    def _watched(self, scope: Scope, send: Send) -> Send:
        """Return `send` that also ends a conversation's sessions when its client ends the
        conversation."""
        session = _header(scope, _SESSION)

        async def watch(message: Message) -> None:
            ended = scope["method"] == "DELETE" and message.get("status") == 200
            if ended and message["type"] == "http.response.start" and session:
                await anyio.to_thread.run_sync(self._on_end, owner_id(scope[CLIENT], session))
            await send(message)

        return watch


def _user(client: str) -> AuthenticatedUser:
    """Return the client for the SDK, which binds a conversation to the client that began it."""
    return AuthenticatedUser(AccessToken(token="", client_id=client, scopes=[]))


def _with_deadline(receive: Receive, gone: anyio.Event) -> Receive:
    """Return `receive` with a deadline for the body; a late body counts as a disconnect."""
    deadline = anyio.current_time() + _BODY_SECONDS

    async def hear() -> Message:
        nonlocal deadline
        message: Message = {"type": "http.disconnect"}
        with anyio.CancelScope(deadline=deadline):
            message = await receive()
        if message["type"] == "http.disconnect":
            gone.set()
        elif not message.get("more_body", False):
            deadline = float("inf")  # only the disconnect follows, at any time
        return message

    return hear


async def _checked(scope: Scope, hear: Receive) -> Receive:
    """Read a body ahead, and return what passes it on; raises msgspec.DecodeError if it decodes to many
    times its size, as a line of stdin that does is refused too.

    A body that is too long is passed on as it comes: the app refuses it.
    """
    read: deque[Message] = deque()
    length = size = 0
    reads = scope["method"] == "POST" and _content_length(scope) <= LINE_BYTES
    while reads and length <= LINE_BYTES:
        read.append(message := await hear())
        piece = message.get("body", b"")
        length, size = length + len(piece), size + decoded_bytes(piece)
        reads = message.get("more_body", False)
    refuse_expansion(length, size)

    async def again() -> Message:
        return read.popleft() if read else await hear()

    return again


def _without_own_origin(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leave out an Origin that equals the host and port that the request was sent to.

    Such a request is from our own page.  The Host itself is checked after this, so a foreign name that
    resolves to us (DNS rebinding) gains nothing.
    """
    said = dict(headers)
    own = {scheme + said.get(b"host", b"") for scheme in (b"http://", b"https://")}
    if said.get(b"origin") not in own:
        return headers
    return [each for each in headers if each[0] != b"origin"]


def _duplicate_header(scope: Scope) -> str:
    """Return the name of a duplicate header that access depends on, else ""."""
    names = [key for key, _ in scope["headers"]]
    return next((key.decode() for key in _ONCE if names.count(key) > 1), "")


def _header(scope: Scope, name: bytes) -> str:
    """Return a header, "" if it is missing or duplicate."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _length(scope: Scope) -> int:
    """Return the length of a body; the limit if the request does not declare one.  Transfer-encoding
    overrides content-length.  The SDK refuses a longer body unread."""
    if any(key == b"transfer-encoding" for key, _ in scope["headers"]):
        return LINE_BYTES
    return min(_content_length(scope), LINE_BYTES)


def _content_length(scope: Scope) -> int:
    return int(next((value for key, value in scope["headers"] if key == b"content-length"), 0))


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
    return AccessMiddleware(app, tokens, on_end)

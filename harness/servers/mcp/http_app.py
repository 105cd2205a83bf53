"""The protocol over HTTP: which requests are let in, and what is told of clients that go away."""

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

from ....runner.nesting import decoded_bytes, refuse_expansion
from .clients import CLIENT, owner_id
from .http_server import MOST_CONNECTIONS, App, Message, Receive, Scope, Send, let_in
from .request_threads import GONE
from .stdio import LINE_BYTES
from .tokens import Tokens
from .weights import Weights

PATH = "/mcp"
_REQUESTS_OF_ONE = MOST_CONNECTIONS * 3 // 4  # of one client: some are left for others
_BODY_SECONDS = 60.0  # from the header of a request to the last byte of its body
_MOST_CONVERSATIONS = 256
_IDLE_SECONDS = 1800.0  # of a conversation
_SESSION = b"mcp-session-id"
_ONCE = (b"authorization", b"host", b"origin", b"mcp-session-id")  # others would read another one


class AccessMiddleware:
    """Lets in requests that come with a token, and tells the app whose each one is."""

    def __init__(self, app: App, tokens: Tokens, on_end: Callable[[str], None]) -> None:
        self._app = app
        self._tokens = tokens
        self._on_end = on_end
        self._bodies = Weights()
        self._requests = Weights(MOST_CONNECTIONS, _REQUESTS_OF_ONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request before a byte of its body is read, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the lifespan; there are no websockets
            return
        client = self._tokens.client_of(_header(scope, b"authorization"))
        if client is None:
            refusal = Response("a token is needed\n", 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
        elif twice := _given_twice(scope):
            await Response(f"the header {twice} stands there twice\n", 400)(scope, receive, send)
        else:
            await self._let_in(client, scope, receive, send)

    async def _let_in(self, client: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a client's request on, if it does not ask for too much at once."""
        with (
            self._requests.held(client, 1) as one_more,
            self._bodies.held(client, _length(scope)) as fits,
        ):
            if not (one_more and fits):
                await Response("too much is asked at once\n", 503)(scope, receive, send)
                return
            let_in(scope)
            gone = anyio.Event()
            scope.update({CLIENT: client, GONE: gone, "user": _user(client)})
            scope["headers"] = _without_own_origin(scope["headers"])
            try:
                body = await _checked(scope, _heard(receive, gone))
            except msgspec.DecodeError as error:
                await Response(f"the body is not read: {error}\n", 400)(scope, receive, send)
                return
            await self._app(scope, body, self._watched(scope, send))

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
    """Return what passes a body on, in time; one that does not come in time ends as a client that has
    gone away."""
    deadline = anyio.current_time() + _BODY_SECONDS

    async def hear() -> Message:
        nonlocal deadline
        message: Message = {"type": "http.disconnect"}
        with anyio.CancelScope(deadline=deadline):
            message = await receive()
        if message["type"] == "http.disconnect":
            gone.set()
        elif not message.get("more_body", False):
            deadline = float("inf")  # what comes next is the end, however late
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
    """Leave out an Origin that is the very host, and port, that the request was sent to.

    Such a request is no other page's.  Whether the host is one of ours is checked after this, so
    another name that resolves to us (DNS rebinding) gains nothing.
    """
    said = dict(headers)
    own = {scheme + said.get(b"host", b"") for scheme in (b"http://", b"https://")}
    if said.get(b"origin") not in own:
        return headers
    return [each for each in headers if each[0] != b"origin"]


def _given_twice(scope: Scope) -> str:
    """Return the name of a header that decides who is let in, if it is there twice."""
    names = [key for key, _ in scope["headers"]]
    return next((key.decode() for key in _ONCE if names.count(key) > 1), "")


def _header(scope: Scope, name: bytes) -> str:
    """Return a header, empty if it is not there, or there twice."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _length(scope: Scope) -> int:
    """Return how long a body is; one that does not say may be as long as any."""
    if any(key == b"transfer-encoding" for key, _ in scope["headers"]):  # that counts, with both
        return LINE_BYTES
    return min(_content_length(scope), LINE_BYTES)  # a longer one is refused before it is read


def _content_length(scope: Scope) -> int:
    return int(next((value for key, value in scope["headers"] if key == b"content-length"), 0))


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
    return AccessMiddleware(app, tokens, on_end)

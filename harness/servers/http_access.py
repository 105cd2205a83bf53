"""Access over HTTP: authentication by a token, quotas, and detection of clients that disconnect.

A request is refused before a byte of its body is read.
"""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio
from starlette.responses import Response

from ...policies.errors import BusyError
from ...runner.nesting import decoded_bytes, refuse_expansion
from .client_quota import ClientQuota
from .http_server import MOST_CONNECTIONS, App, Message, Receive, Scope, Send, admit
from .tokens import CLIENT, GONE, Tokens

MIB = 1024 * 1024
# A proxy and this server could each read another one.
_ONCE = (b"authorization", b"host", b"origin")
_MOST_HEADERS = 100  # as most servers and proxies have it


class AccessLimits(NamedTuple):
    """Limits of the requests of HTTP clients; some connections are left for other clients."""

    requests: int = MOST_CONNECTIONS  # at work, or waiting
    requests_per_client: int = MOST_CONNECTIONS * 3 // 4
    body_bytes: int = 16 * MIB  # of one request
    held_bytes: int = 256 * MIB  # of the bodies of all requests
    held_bytes_per_client: int = 128 * MIB
    body_seconds: float = 60.0  # from the header of a request to the last byte of its body


class AccessMiddleware:
    """ASGI middleware that admits requests with a valid token and passes the client's name on."""

    def __init__(
        self, app: App, tokens: Tokens, limits: AccessLimits = AccessLimits(),  # noqa: B008 - a constant
        once: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        """`once`: further headers that a request may have only once."""
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._once = (*_ONCE, *once)
        self._bodies = ClientQuota(
            "bytes of bodies", limits.held_bytes_per_client, limits.held_bytes
        )
        self._requests = ClientQuota(
            "unanswered requests", limits.requests_per_client, limits.requests
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # lifespan; there are no websockets
            return
        client = self._tokens.client_of(header(scope, b"authorization"))
        if len(scope["headers"]) > _MOST_HEADERS:
            refusal = Response(f"more than {_MOST_HEADERS} headers\n", 431)
            await refusal(scope, receive, send)
        elif _has_two_lengths(scope):
            close = {"Connection": "close"}
            refusal = Response("both content-length and transfer-encoding\n", 400, close)
            await refusal(scope, receive, send)
        elif client is None:
            refusal = Response("a token is required\n", 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
        elif twice := self._duplicate_header(scope):
            await Response(f"duplicate header {twice}\n", 400)(scope, receive, send)
        else:
            await self._admit(client, scope, receive, send)

    async def _admit(self, client: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a client's request on if the client stays within its quotas, else answer 503."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._requests.held(client))
                length = body_length(scope, self._limits.body_bytes)
                held.enter_context(self._bodies.held(client, length))
            except BusyError as error:
                await Response(f"{error.what}\n", 503)(scope, receive, send)
                return
            admit(scope)
            gone = anyio.Event()
            scope.update({CLIENT: client, GONE: gone})
            await self._app(scope, self._with_deadline(receive, gone), send)

    def _duplicate_header(self, scope: Scope) -> str:
        """Return the name of a duplicate header that access depends on, else ""."""
        names = [key for key, _ in scope["headers"]]
        return next((key.decode() for key in self._once if names.count(key) > 1), "")

    def _with_deadline(self, receive: Receive, gone: anyio.Event) -> Receive:
        """Return `receive` with a deadline for the body; a late body counts as a disconnect."""
        deadline = anyio.current_time() + self._limits.body_seconds

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


async def read_ahead(scope: Scope, receive: Receive, most: int) -> Receive:
    """Read a JSON body, and return what passes it on; raises msgspec.DecodeError if it decodes to many
    times its size.

    A body of more than `most` bytes is passed on as it comes: the app refuses it.
    """
    read: deque[Message] = deque()
    length = size = 0
    reads = scope["method"] == "POST" and content_length(scope) <= most
    while reads and length <= most:
        read.append(message := await receive())
        piece = message.get("body", b"")
        length, size = length + len(piece), size + decoded_bytes(piece)
        reads = message.get("more_body", False)
    refuse_expansion(length, size)

    async def again() -> Message:
        return read.popleft() if read else await receive()

    return again


def _has_two_lengths(scope: Scope) -> bool:
    """Tell whether a request has two headers that say how long its body is: a proxy that believes the
    other one passes on what it takes for one request, and this server for two (RFC 9112, 6.3)."""
    names = {key for key, _ in scope["headers"]}
    return {b"content-length", b"transfer-encoding"} <= names


def own_origins(headers: Mapping[bytes, bytes]) -> set[bytes]:
    """Return the origins of pages that came from the host and port to which a request was sent."""
    return {scheme + headers.get(b"host", b"") for scheme in (b"http://", b"https://")}


def header(scope: Scope, name: bytes) -> str:
    """Return a header, "" if it is missing or duplicate."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def body_length(scope: Scope, most: int) -> int:
    """Return the length of a body; `most` if the request does not declare one, or a larger one, which
    the app refuses unread.  Transfer-encoding overrides content-length."""
    if any(key == b"transfer-encoding" for key, _ in scope["headers"]):
        return most
    return min(content_length(scope), most)


def content_length(scope: Scope) -> int:
    """Return the length that a request declares, 0 without one."""
    return int(next((value for key, value in scope["headers"] if key == b"content-length"), 0))

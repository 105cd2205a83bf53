"""Access over HTTP: the name of this server and the page that sends a request, authentication by a
token, quotas, and detection of clients that disconnect.

A request is refused before a byte of its body is read.  A web page in a browser on this host can reach
the loopback.  The name in Host stops pages whose own name resolves to the loopback (DNS rebinding),
and Origin stops all other foreign pages.

`ClientTurns`: limits the work at once of each client and of all together; the rest waits.
`run_in_thread`: work that blocks, without a line of waiting requests for all clients.
"""

import contextlib
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from starlette.responses import Response

from ...policies.errors import BusyError
from ...runner.channel import decoded_bytes, refuse_expansion
from .client_quota import CLIENT, GONE, ClientQuota, Tokens
from .http_server import MOST_CONNECTIONS, App, Message, Receive, Scope, Send, admit

MIB = 1024 * 1024
# Headers that a proxy and this server could read differently if they occur twice.
_ONCE = (b"authorization", b"host", b"origin")
_MOST_HEADERS = 100  # as most servers and proxies have it


class AccessLimits(NamedTuple):
    """Limits of the requests of HTTP clients; some connections are left for other clients."""

    requests: int = MOST_CONNECTIONS  # running or waiting requests
    requests_per_client: int = MOST_CONNECTIONS * 3 // 4
    body_bytes: int = 16 * MIB  # bytes of one request body
    held_bytes: int = 256 * MIB  # bytes of all request bodies
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
                deadline = float("inf")  # only the disconnect can follow, at any time
            return message

        return hear


async def until_gone(scope: Scope, receive: Receive) -> None:
    """Wait until the client of a request, whose body was read, has disconnected."""
    while not scope[GONE].is_set():
        await receive()


async def read_ahead(scope: Scope, receive: Receive, most: int) -> Receive:
    """Read a JSON body, and return a receiver that passes it on; raises msgspec.DecodeError if it
    decodes to many times its size.

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
    """Tell whether a request has two headers with the length of its body. A proxy that uses the
    other header may pass on one request that this server reads as two (RFC 9112, 6.3)."""
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


_PORT = re.compile(r":[0-9]{1,5}\Z")
_FOREIGN = ("cross-site", "same-site")  # values of Sec-Fetch-Site; same-site includes another port
_METHODS = "GET, POST, PUT, DELETE"
_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, mcp-protocol-version, "
    "mcp-session-id"
)
_PREFLIGHT_SECONDS = "600"


class SiteChecks:
    """ASGI middleware that refuses requests to foreign names and requests of foreign pages.

    `hosts` are the names of this server, without ports; `origins` are the pages that may connect
    besides our own.
    """

    def __init__(self, app: App, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = {each.lower() for each in hosts}
        self._origins = {each.encode() for each in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = _origin(scope)
        if _PORT.sub("", header(scope, b"host").lower()) not in self._hosts:
            answer: App = Response("unknown host: name it with --remote\n", 421)
        elif not self._is_ours(scope, origin):
            answer = Response("pages of this origin may not connect\n", 403)
        elif origin in self._origins and scope["method"] == "OPTIONS":
            answer = Response(status_code=204, headers=_preflight(origin))
        elif origin in self._origins:
            answer, send = self._app, _readable_by(origin, send)
        else:
            answer = self._app
        await answer(scope, receive, send)

    def _is_ours(self, scope: Scope, origin: bytes) -> bool:
        """Tell whether a request comes from our own page, from an allowed one, or from no page."""
        if origin:
            return origin in self._origins or origin in own_origins(dict(scope["headers"]))
        return header(scope, b"sec-fetch-site") not in _FOREIGN  # a picture or a link has no Origin


def _origin(scope: Scope) -> bytes:
    """Return the origin of a request: b"" for none, and one that nobody may have for several."""
    found = [value for key, value in scope["headers"] if key == b"origin"]
    return found[0] if len(found) == 1 else b", ".join(found)


def _preflight(origin: bytes) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin.decode(), "vary": "origin",
        "access-control-allow-methods": _METHODS, "access-control-allow-headers": _HEADERS,
        "access-control-max-age": _PREFLIGHT_SECONDS,
    }  # fmt: skip


def _readable_by(origin: bytes, send: Send) -> Send:
    """Return `send` that lets a page of an allowed origin read the answer."""

    async def with_header(message: Scope) -> None:
        if message["type"] == "http.response.start":
            allowed = [
                (b"access-control-allow-origin", origin), (b"vary", b"origin"),
                (b"access-control-expose-headers", b"mcp-session-id"),
            ]  # fmt: skip
            message = {**message, "headers": [*message.get("headers", ()), *allowed]}
        await send(message)

    return with_header


_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


async def run_in_thread(
    work: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments
) -> _Result:
    """Return what `work` returns in a thread of its own.

    anyio's default has 40 threads for all clients, which one of them could hold.  The limits of a
    client's requests bound the number of these.
    """
    return await anyio.to_thread.run_sync(work, *arguments, limiter=anyio.CapacityLimiter(1))


class ClientTurns:
    """Limits the work at once, such as threads, for one event loop.

    A free turn goes to the waiting client that holds the fewest turns: a client that waits with many
    requests is not served before one that waits with a single one.
    """

    def __init__(self, per_client: int, total: int) -> None:
        self._per_client = per_client
        self._total = total
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[anyio.Event]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a turn of the client, and hold it during the block."""
        await self._take(client)
        try:
            yield
        finally:
            self._give_back(client)

    def held_by(self, client: Hashable) -> int:
        """Return the number of turns that a client holds."""
        return self._held[client]

    async def _take(self, client: Hashable) -> None:
        if self._held.total() < self._total and self._held[client] < self._per_client:
            self._held[client] += 1
            return
        its_turn = anyio.Event()
        self._waiting.setdefault(client, deque()).append(its_turn)
        try:
            await its_turn.wait()
        except BaseException:  # cancelled
            if its_turn.is_set():
                self._give_back(client)
            else:
                self._leave(client, its_turn)
            raise

    def _give_back(self, client: Hashable) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        ready = [each for each in self._waiting if self._held[each] < self._per_client]
        if ready:
            following = min(ready, key=self._held.__getitem__)
            its_turn = self._waiting[following][0]
            self._leave(following, its_turn)
            self._held[following] += 1
            its_turn.set()

    def _leave(self, client: Hashable, its_turn: anyio.Event) -> None:
        self._waiting[client].remove(its_turn)
        if not self._waiting[client]:
            del self._waiting[client]

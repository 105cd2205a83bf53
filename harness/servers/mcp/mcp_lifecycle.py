"""The life of the MCP server, over a pipe or over HTTP, from start to signal or end of input.

Over a pipe each message has a limit; its descriptors are those that `claim` took from everything else
(stdio_streams.py).  The HTTP application is the SDK's own behind the checks of access, with a limit to
the conversations of each client.  A conversation begins with a handshake over HTTP, and the SDK makes
its id. It ends when its client ends it, when it has been idle, or when the SDK no longer knows it;
then all that it held is released.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import anyio
import msgspec
from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.responses import Response

from ....policies.errors import BusyError, CellwrightError
from ....runner.channel import refuse_large_json
from ....runner.concurrency import begin_thread
from ...mcp.stdio_transport import RefusedLine, read_json_lines, write_all
from ...runs.durable_runs import Runs
from ..client_quota import CLIENT, GONE, ClientQuota, HttpSettings, Tokens
from ..http_access import (
    AccessLimits,
    AccessMiddleware,
    SiteChecks,
    header,
    read_ahead,
    run_in_thread,
)
from ..http_server import App, Message, Receive, Scope, Send, serve_at, until_signalled
from ..services import OwnedSessions, ServicesByClient
from .approvals import PIPE, owner_id
from .call_runner import (
    BYTES_OF_ALL,
    BYTES_OF_ONE,
    READER,
    RETRY_MILLISECONDS,
    ConversationEvents,
    EventReader,
    KeptEvents,
)
from .mcp_server import McpServer
from .stdio_streams import StdioStreams


def run(
    services: ServicesByClient, sessions: OwnedSessions, runs: Runs, place: HttpSettings | StdioStreams,
    *, open_world: bool = False, around: Callable[[App], App] | None = None,
) -> None:  # fmt: skip
    """Serve over HTTP, or over a pipe until the client closes it; a signal ends either.

    `open_world` tells clients that some tools act outside this host.  `around` wraps the application of
    HTTP.
    """
    server = McpServer(services, sessions, runs, open_world=open_world).server()
    try:
        if isinstance(place, StdioStreams):
            # The one client needs it at once; its handshake does not wait for it.
            begin_thread("cellwright-warm-up", lambda: _warm_up(services))
            anyio.run(until_signalled, lambda ending: serve_stdio(server, place))
            return
        make = partial(
            app_of, server, place.tokens, place.hosts, place.origins, sessions.close_all, around
        )
        announce = partial(_announced, place.made)
        anyio.run(until_signalled, partial(serve_at, place, make, announce))
    finally:
        sessions.discard_paused()


def _warm_up(services: ServicesByClient) -> None:
    """Start the cells of the client; errors are raised by its first request."""
    with contextlib.suppress(CellwrightError):
        services.of(PIPE.client)


def _announced(token: str, url: str) -> list[str]:
    """Return the text that the server prints when it listens; `token`: the token that it made, if
    any."""
    words = f"cellwright: serving MCP at {url}{PATH}"
    return [words, f"cellwright: token {token}"] if token else [words]


LINE_BYTES = 16 * 1024 * 1024


class LineReader:
    """The client's messages as text.  A refused one is reported on stderr and comes as an empty line,
    which the SDK answers as a parse error."""

    def __init__(self, descriptor: int, longest: int = LINE_BYTES) -> None:
        self._descriptor = descriptor
        self._longest = longest

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in read_json_lines(self._descriptor, self._longest, _check_decoded_size):
            if isinstance(line, RefusedLine):
                _report(f"a message is not read: {line}")
                yield ""
            else:
                yield line.decode("utf-8", "replace")


def _check_decoded_size(line: bytes) -> None:
    try:
        refuse_large_json(line)
    except msgspec.DecodeError as error:
        raise RefusedLine(str(error)) from None


class LineWriter:
    """The answers as text, written at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, text: str) -> None:
        """Write all of it; lone surrogates become question marks."""
        await write_all(self._descriptor, text.encode("utf-8", "replace"))

    async def flush(self) -> None:
        """Do nothing: `write` buffers nothing."""


async def serve_stdio(server: Server[Any], streams: StdioStreams) -> None:
    """Serve the one client at the other end until it closes its end."""
    stdin = cast("anyio.AsyncFile[str]", LineReader(streams.reading))
    stdout = cast("anyio.AsyncFile[str]", LineWriter(streams.writing))
    with contextlib.suppress(BrokenPipeError):
        async with stdio_server(stdin, stdout) as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())


def _report(problem: str) -> None:
    print(f"cellwright: {problem}", file=sys.stderr, flush=True)


IDLE_SECONDS = 1800.0
MOST, MOST_OF_ONE = 256, 192
_BEHIND_SECONDS = 1.0  # seconds after the SDK's own timer, which ends idle conversations


class ClientConversation:
    """One conversation of a client; `id` is empty until the SDK has answered the handshake."""

    def __init__(self, client: str, events: ConversationEvents) -> None:
        self.client = client
        self.id = ""
        self.events = events
        self.requests = 0  # unanswered requests
        self.idle_timer: asyncio.TimerHandle | None = None


class Conversations:
    """The conversations of all clients, for one event loop."""

    def __init__(
        self, on_end: Callable[[str, str], None], most_of_one: int = MOST_OF_ONE, most: int = MOST,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        """`on_end` is called in a thread, with the client and the id of a conversation that ended."""
        self._on_end = on_end
        self._idle_seconds = idle_seconds
        self._quota = ClientQuota("conversations", most_of_one, most, "end one by DELETE")
        self._event_bytes = ClientQuota("bytes of kept events", BYTES_OF_ONE, BYTES_OF_ALL)
        self._open: dict[str, ClientConversation] = {}
        self._ending: set[asyncio.Task[None]] = set()  # an event loop has only weak references

    @contextlib.contextmanager
    def used(self, client: str, id: str, gone: anyio.Event) -> Iterator[ClientConversation | None]:
        """Count a request of a conversation during the block; `gone` is set if its client disconnects.

        Without an id the request begins one: it is forgotten after the block, unless `keep` was called
        in it.  Yields None for an unknown id, or one of another client; raises BusyError if the client
        has too many.
        """
        conversation = self._open.get(id) if id else self._begin(client)
        if conversation is None or conversation.client != client:
            yield None
            return
        conversation.requests += 1
        if conversation.idle_timer:
            conversation.idle_timer.cancel()
        token = READER.set(EventReader(conversation.events, gone))
        try:
            yield conversation
        finally:
            READER.reset(token)
            conversation.requests -= 1
            self._rest(conversation)

    def keep(self, conversation: ClientConversation, id: str) -> None:
        """Keep a conversation that the SDK gave an id."""
        conversation.id = id
        self._open[id] = conversation

    async def end(self, conversation: ClientConversation) -> None:
        """Release all that a conversation holds; ending it twice is harmless."""
        if self._open.pop(conversation.id, None) is not None:
            self._release(conversation)
            await run_in_thread(self._on_end, conversation.client, conversation.id)

    def _begin(self, client: str) -> ClientConversation:
        self._quota.take(client)
        return ClientConversation(client, ConversationEvents(self._event_bytes, client))

    def _rest(self, conversation: ClientConversation) -> None:
        if not conversation.id:
            self._release(conversation)
        elif not conversation.requests and conversation.id in self._open:
            after = self._idle_seconds + _BEHIND_SECONDS
            loop = asyncio.get_running_loop()
            conversation.idle_timer = loop.call_later(after, self._end_soon, conversation)

    def _end_soon(self, conversation: ClientConversation) -> None:
        ending = asyncio.ensure_future(self.end(conversation))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _release(self, conversation: ClientConversation) -> None:
        if conversation.idle_timer:
            conversation.idle_timer.cancel()
        conversation.events.clear()
        self._quota.give_back(conversation.client)


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
    return AuthenticatedUser(AccessToken(token="", client_id=client, scopes=[]))


def app_of(
    server: Server[Any], tokens: Tokens, hosts: Sequence[str], origins: Sequence[str],
    on_end: Callable[[str], None], around: Callable[[App], App] | None = None,
) -> App:  # fmt: skip
    """Return the whole application, with the middleware `around` it.

    `hosts` are the allowed names of this server in Host, which stops DNS rebinding; `origins` are the
    allowed origins of web pages.
    """
    app = server.streamable_http_app(
        streamable_http_path=PATH, max_request_body_size=LINE_BYTES,
        max_sessions=MOST, session_idle_timeout=IDLE_SECONDS,
        event_store=KeptEvents(), retry_interval=RETRY_MILLISECONDS,
        # SiteChecks does it, because the SDK's check accepts anything after the colon as a port.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )  # fmt: skip
    conversations = Conversations(lambda client, id: on_end(owner_id(client, id)))
    once = [_SESSION, _VERSION]
    known = AccessMiddleware(ConversationMiddleware(app, conversations), tokens, _LIMITS, once)
    whole: App = SiteChecks(known, hosts, origins)
    return around(whole) if around else whole

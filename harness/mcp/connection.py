"""An open connection to a server: lists its tools, calls them, and answers its questions."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
from mcp import Client
from mcp.types import (
    CallToolResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    Implementation,
    ToolListChangedNotification,
)

from ...policies.errors import ToolInvalid
from ..schemas.validation import compile_schema
from .config import ServerConfig
from .definitions import Definition, definition_of, shown
from .message_filter import DEFINITIONS
from .transports import Transport

MAX_PAGES = 100
MAX_TOOLS = 5000
_MOST_QUESTIONS = 4  # of one server, waiting for a person at once


class Elicitation(NamedTuple):
    """A server's question to its user: a form with the fields of `schema`."""

    server: str
    message: str
    schema: dict[str, Any]


Elicit = Callable[[Elicitation], dict[str, Any] | None]  # the answer; None declines
Progress = Callable[[float, float | None, str], None]  # done, total if known, message


class Listing(NamedTuple):
    """The tools of a server by its own names, and why others were left out."""

    definitions: dict[str, Definition]
    dropped: tuple[str, ...] = ()


class ServerConnection:
    """An open SDK client over a transport.  Runs on the event loop."""

    def __init__(self, client: Client, transport: Transport) -> None:
        self._client = client
        self.transport = transport
        self.protocol = client.protocol_version  # the SDK's client forgets it when it closes

    @property
    def has_change_stream(self) -> bool:
        """Tell whether it announces changed tools on a stream that has to be followed."""
        tools = self._client.server_capabilities.tools
        return bool(tools and tools.list_changed) and self.protocol >= "2026-07-28"

    async def list_tools(self) -> Listing:
        """Return all tools, page by page; stops after too many pages or tools, and at a repeated
        page."""
        found: dict[str, Definition] = {}
        dropped: list[str] = []
        cursors: set[str | None] = set()
        cursor: str | None = None
        while cursor not in cursors and len(cursors) < MAX_PAGES and len(found) < MAX_TOOLS:
            cursors.add(cursor)
            page = await self._client.list_tools(cursor=cursor)
            good, bad = (page.meta or {}).get(DEFINITIONS, ((), ()))
            dropped += [*bad, *_added(found, good)]
            cursor = page.next_cursor
            if not cursor:
                return Listing(found, tuple(dropped))
        dropped.append("further pages: too many, or a repeated cursor")
        return Listing(found, tuple(dropped))

    async def call(
        self, wire: str, arguments: dict[str, Any], on_progress: Progress | None = None
    ) -> CallToolResult:
        """Call a tool; cancelling this cancels the call at the server."""

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            if on_progress:
                on_progress(progress, total, shown(message or "")[:1000])

        return await self._client.call_tool(wire, arguments, progress_callback=progressed)

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call `changed` at each announcement of changed tools on the stream."""
        async with self._client.listen(tools_list_changed=True) as events:
            async for _ in events:
                await changed()


def _added(found: dict[str, Definition], page: list[dict[str, Any]]) -> list[str]:
    """Add a page, as the filter let it through, to `found`; return why some tools were left out."""
    dropped = []
    for each in (Definition(said["name"], said) for said in page):
        if each.wire in found:
            dropped.append(f"{each.wire!a}: duplicate name")
        elif len(found) >= MAX_TOOLS:
            dropped.append(f"{each.wire!a}: more than {MAX_TOOLS} tools")
        else:
            found[each.wire] = each
    return dropped


def client_over(
    transport: Transport,
    config: ServerConfig,
    elicit: Elicit | None,
    changed: Callable[[], Awaitable[None]],
) -> Client:
    """Return an SDK client, not yet entered, that answers the server's questions."""

    async def message(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            await changed()

    return Client(
        transport, mode=config.protocol, cache=None, message_handler=message,
        client_info=Implementation(name="cellwright", version="1"),
        elicitation_callback=_Questions(config.name, elicit).ask,
    )  # fmt: skip


class _Questions:
    """Answers one server's questions; declines without `elicit`, and beyond a few at once."""

    def __init__(self, server: str, elicit: Elicit | None) -> None:
        self._server = server
        self._elicit = elicit
        self._waiting = 0

    async def ask(self, context: object, params: ElicitRequestParams) -> ElicitResult:
        elicit = self._elicit
        if (
            elicit is None
            or self._waiting >= _MOST_QUESTIONS
            or not isinstance(params, ElicitRequestFormParams)  # a URL that a person would open
        ):
            return ElicitResult(action="decline")
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(
                self._answer, elicit, params, abandon_on_cancel=True
            )
        finally:
            self._waiting -= 1

    def _answer(self, elicit: Elicit, params: ElicitRequestFormParams) -> ElicitResult:
        try:
            schema = json.loads(json.dumps(params.requested_schema))
            definition_of({"name": "form", "inputSchema": schema})
            given = elicit(Elicitation(self._server, shown(params.message), schema))
            if given is None or compile_schema(schema).complaints(given):
                return ElicitResult(action="decline")
        except (ToolInvalid, ValueError, TypeError):
            return ElicitResult(action="decline")
        return ElicitResult(action="accept", content=given)

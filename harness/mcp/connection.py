"""A conversation with a server that is under way: its tools, and calls of them."""

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
_MOST_QUESTIONS = 4  # of one server, that wait for a person at once


class Elicitation(NamedTuple):
    """What a server asks whoever uses it: a form with the fields of `schema`."""

    server: str
    message: str
    schema: dict[str, Any]


Elicit = Callable[[Elicitation], dict[str, Any] | None]  # the answer; None declines
Progress = Callable[[float, float | None, str], None]  # so much, of that much, in words


class Listing(NamedTuple):
    """The tools of a server, by what it calls them, and why others were left out."""

    definitions: dict[str, Definition]
    dropped: tuple[str, ...] = ()


class ServerConnection:
    """An open client over a transport.  Everything here runs on the loop."""

    def __init__(self, client: Client, transport: Transport) -> None:
        self._client = client
        self.transport = transport
        self.protocol = client.protocol_version  # the client forgets it, and others ask at any time

    @property
    def tells_changes(self) -> bool:
        """Tell whether it says when its tools change, and has to be listened to for that."""
        tools = self._client.server_capabilities.tools
        return bool(tools and tools.list_changed) and self.protocol >= "2026-07-28"

    async def list_tools(self) -> Listing:
        """Return all tools, page by page; pages that never end, or go in circles, are left."""
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
        dropped.append("more pages: they go in circles, or are too many")
        return Listing(found, tuple(dropped))

    async def call(
        self, wire: str, arguments: dict[str, Any], on_progress: Progress | None = None
    ) -> CallToolResult:
        """Call a tool; cancelling this cancels it there."""

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            if on_progress:
                on_progress(progress, total, shown(message or "")[:1000])

        return await self._client.call_tool(wire, arguments, progress_callback=progressed)

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call `changed` whenever the tools are said to have changed, where that is a stream."""
        async with self._client.listen(tools_list_changed=True) as events:
            async for _ in events:
                await changed()


def _added(found: dict[str, Definition], page: list[dict[str, Any]]) -> list[str]:
    """Put a page, of what the messages let through, into `found`; return why some of it was not."""
    dropped = []
    for each in (Definition(said["name"], said) for said in page):
        if each.wire in found:
            dropped.append(f"{each.wire!a}: there is another of that name")
        elif len(found) >= MAX_TOOLS:
            dropped.append(f"{each.wire!a}: there are {MAX_TOOLS} already")
        else:
            found[each.wire] = each
    return dropped


def client_over(
    transport: Transport,
    config: ServerConfig,
    elicit: Elicit | None,
    changed: Callable[[], Awaitable[None]],
) -> Client:
    """Return a client, not yet entered, that answers what the server may ask."""

    async def message(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            await changed()

    return Client(
        transport, mode=config.protocol, cache=None, message_handler=message,
        client_info=Implementation(name="cellwright", version="1"),
        elicitation_callback=_Questions(config.name, elicit).ask,
    )  # fmt: skip


class _Questions:
    """What one server asks; without anybody to ask, and beyond a few at once, it is declined."""

    def __init__(self, server: str, elicit: Elicit | None) -> None:
        self._server = server
        self._elicit = elicit
        self._waiting = 0

    async def ask(self, context: object, params: ElicitRequestParams) -> ElicitResult:
        elicit = self._elicit
        if (
            elicit is None
            or self._waiting >= _MOST_QUESTIONS
            or not isinstance(params, ElicitRequestFormParams)  # a URL, which a person would follow
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

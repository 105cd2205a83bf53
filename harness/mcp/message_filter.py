"""`MessageFilter`: checks every message of a server before the SDK sees it, for all transports.

It limits the rate of messages.  In a list of tools it leaves the SDK's session only names and input
schemas of valid tools: one invalid tool would otherwise fail the whole list, and the session would
check results against output schemas without a limit.  The broker checks results, within a budget.
"""

import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
from mcp.client._transport import ReadStream, WriteStream
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCRequest, JSONRPCResponse

from ...policies.errors import ToolInvalid
from .definitions import Definition, definition_of
from .stdio import ProtocolViolation

MESSAGES_AT_ONCE = 2000  # a burst; each request allows one more
MESSAGES_PER_SECOND = 500.0
_MOST_IN_A_PAGE = 2000
DEFINITIONS = "cellwright/definitions"  # key of the definitions in a page's _meta
_Received = SessionMessage | Exception


class MessageFilter:
    """Both streams of one connection.  `why` is the reason once the connection has ended."""

    def __init__(
        self, read: ReadStream[_Received], write: WriteStream[SessionMessage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._read = read
        self._write = write
        self._clock = clock
        self._allowance = float(MESSAGES_AT_ONCE)
        self._listings: set[str | int] = set()
        self.heard = clock()  # time of the last message
        self.why = ""
        self.ended = anyio.Event()

    # reading

    async def receive(self) -> _Received:
        try:
            item = await self._read.receive()
            self._count()
        except anyio.EndOfStream:
            self.end("it closed the connection")
            raise
        except ProtocolViolation as violation:
            self.end(str(violation))
            raise anyio.EndOfStream from None
        if isinstance(item, ProtocolViolation):
            self.end(str(item))
            raise anyio.EndOfStream
        return await self._filtered(item) if isinstance(item, SessionMessage) else item

    def end(self, why: str) -> None:
        """End the connection; only the first reason is kept."""
        self.why = self.why or why
        self.ended.set()

    def _count(self) -> None:
        """Refill and spend the allowance (a token bucket); raises ProtocolViolation if it is empty."""
        now = self._clock()
        filled = self._allowance + (now - self.heard) * MESSAGES_PER_SECOND
        self._allowance = min(max(self._allowance, MESSAGES_AT_ONCE), filled) - 1
        self.heard = now
        if self._allowance < 0:
            raise ProtocolViolation(
                f"it floods: more than {MESSAGES_PER_SECOND:g} messages a second"
            )

    async def _filtered(self, received: SessionMessage) -> SessionMessage:
        message = received.message
        if isinstance(message, JSONRPCResponse):
            id = coerce_request_id(message.id)  # the SDK's session takes "7" for 7
            is_listing = id in self._listings
            self._listings.discard(id)
            if is_listing:  # in a thread: up to 4 MiB, and all servers share the event loop
                message.result = await anyio.to_thread.run_sync(_page, message.result)
            else:
                message.result = _without_mark(message.result)
        return received

    async def aclose(self) -> None:
        await self._read.aclose()

    def __aiter__(self) -> "MessageFilter":
        return self

    async def __anext__(self) -> _Received:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> "MessageFilter":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def writer(self) -> "FilteredWriter":
        return FilteredWriter(self._write, self._note)

    def _note(self, sent: SessionMessage) -> None:
        if isinstance(sent.message, JSONRPCRequest):
            self._allowance += 1
            if sent.message.method == "tools/list":
                self._listings.add(sent.message.id)


class FilteredWriter:
    """The stream to a server; `note` is called with each sent message."""

    def __init__(
        self, write: WriteStream[SessionMessage], note: Callable[[SessionMessage], None]
    ) -> None:
        self._write = write
        self._note = note

    async def send(self, item: SessionMessage, /) -> None:
        self._note(item)
        await self._write.send(item)

    async def aclose(self) -> None:
        await self._write.aclose()

    async def __aenter__(self) -> "FilteredWriter":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _page(result: dict[str, Any]) -> dict[str, Any]:
    """Return a page of tools for the session, with the valid definitions, and why others are invalid,
    in `_meta`."""
    tools = result.get("tools")
    if not isinstance(tools, list):
        return _without_mark(result)  # the session reports the error
    good: list[Definition] = []
    dropped: list[str] = []
    for each in tools[:_MOST_IN_A_PAGE]:
        try:
            good.append(definition_of(each))
        except ToolInvalid as error:
            name = each.get("name") if isinstance(each, dict) else each
            dropped.append(f"{ascii(name)[:80]}: {error.what}")
    if len(tools) > _MOST_IN_A_PAGE:
        dropped.append(f"{len(tools) - _MOST_IN_A_PAGE} more than {_MOST_IN_A_PAGE} in one page")
    meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
    return {
        **result,
        "tools": [_for_session(each) for each in good],
        "_meta": {**(meta or {}), DEFINITIONS: [[each.said for each in good], dropped]},
    }


def _without_mark(result: dict[str, Any]) -> dict[str, Any]:
    """Return another result without our key in its `_meta`: a server must not forge definitions."""
    meta = result.get("_meta")
    if not isinstance(meta, dict) or DEFINITIONS not in meta:
        return result
    return {**result, "_meta": {key: each for key, each in meta.items() if key != DEFINITIONS}}


def _for_session(definition: Definition) -> dict[str, Any]:
    schema = {"type": "object", **definition.said["inputSchema"]}
    return {"name": definition.wire, "inputSchema": schema}

"""Streams of events (text/event-stream), numbered from 1.

A program waits for a client that reads slowly; a client that does not read at all is dropped.
"""

import logging
from collections.abc import AsyncIterator

import anyio

from ...text.terminal import harmless
from ..http_server import Receive, Scope, Send
from ..tokens import GONE
from .encoding import encoded_json
from .endpoint import ServerEvent
from .problems import problem_of
from .sending import is_sent
from .state import WebLimits

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"), (b"x-accel-buffering", b"no"),
    (b"cross-origin-resource-policy", b"same-origin"),
]  # fmt: skip
_QUIET_SECONDS = 15.0  # until a comment shows that the connection lives
_COMMENT = b": still here\n\n"
ERROR = "error"
_LOG = logging.getLogger(__name__)


async def send_events(
    events: AsyncIterator[ServerEvent],
    limits: WebLimits,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Send events as they come, until the last one or until the client has disconnected.

    An exception before the first event is raised; a later one is the last event, a problem.
    """
    first = await anext(events)
    writer = _Writer(limits.stalled_seconds, scope, send)
    async with anyio.create_task_group() as beside:
        beside.start_soon(_cancel_when_gone, beside.cancel_scope, scope, receive)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        beside.start_soon(writer.show_life)
        try:
            await writer.write(first)
            async for event in events:
                await writer.write(event)
        except Exception as error:  # noqa: BLE001 - told to the client; a bug also to the log
            if problem_of(error).title == "bug":
                _LOG.error("the stream %s failed", harmless(scope["path"]), exc_info=error)
            await writer.write(ServerEvent(ERROR, problem_of(error)))
        finally:
            with anyio.CancelScope(shield=True):
                await events.aclose()  # type: ignore[attr-defined] # a generator
        await writer.end()
        beside.cancel_scope.cancel()


async def _cancel_when_gone(own: anyio.CancelScope, scope: Scope, receive: Receive) -> None:
    while not scope[GONE].is_set():
        await receive()
    own.cancel()


def _json_of(event: ServerEvent) -> bytes:
    return event.data if isinstance(event.data, bytes) else encoded_json(event.data)


class _Writer:
    """Sends events, one at a time, and drops a connection whose client does not read."""

    def __init__(self, stalled_seconds: float, scope: Scope, send: Send) -> None:
        self._stalled_seconds = stalled_seconds
        self._scope = scope
        self._send = send
        self._lock = anyio.Lock()
        self._number = 0
        self._wrote = anyio.Event()

    async def write(self, event: ServerEvent) -> None:
        self._number += 1
        name = f"event: {event.name}\n" if event.name else ""
        head = f"{name}id: {self._number}\ndata: ".encode()
        await self._send_bytes(head + _json_of(event) + b"\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def show_life(self) -> None:
        """Send a comment after each quiet time."""
        while True:
            self._wrote = anyio.Event()
            with anyio.move_on_after(_QUIET_SECONDS) as quiet:
                await self._wrote.wait()
            if quiet.cancelled_caught:
                await self._send_bytes(_COMMENT)

    async def _send_bytes(self, data: bytes) -> None:
        async with self._lock:
            if not await is_sent(data, self._stalled_seconds, self._scope, self._send):
                await anyio.sleep_forever()  # the disconnect cancels it
        self._wrote.set()

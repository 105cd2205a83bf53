"""The connections of the HTTP server: how many there are, and how long one may wait.

uvicorn has no deadline for the header of a request, and a connection that sends none costs its client
nothing.  So a connection has `_WAIT_SECONDS` from its beginning, or from the end of its last answer,
until a request of it was let in; and where there are as many connections as there may be, one that
waits makes room for a new one.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

import anyio
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_CONNECTIONS = 1000
_WAIT_SECONDS = 10.0
_LET_IN = "cellwright.let_in"  # in the state of a request's scope


def let_in(scope: Scope) -> None:
    """Note that a request is welcome: its connection no longer waits until it is answered."""
    noted = scope.get("state", {}).get(_LET_IN)
    if noted:
        noted()


class HttpConnection(H11Protocol):
    """A connection that is closed if it waits for too long.

    Only `let_in` ends its wait.  Bytes do not, nor do requests that are refused: otherwise a client
    without a token could hold the connection by sending one byte now and then.
    """

    most = MOST_CONNECTIONS
    wait_seconds = _WAIT_SECONDS

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, {**app_state, _LET_IN: self._go_on}, _loop)
        self.waits: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._wait()
        if len(self.connections) > self.most:
            _make_room(cast("set[HttpConnection]", self.connections), self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.waits is None:
            self._wait()

    def drop(self) -> None:
        """Close it at once, whatever it has not taken yet."""
        self._go_on()
        self.connections.discard(self)  # it counts until `connection_lost` otherwise
        self.transport.abort()

    def _wait(self) -> None:
        self.waits = self.loop.call_later(self.wait_seconds, self.drop)

    def _go_on(self) -> None:
        if self.waits:
            self.waits.cancel()
        self.waits = None


def _make_room(connections: set[HttpConnection], newest: HttpConnection) -> None:
    """Drop the connection that has waited longest, of the address from which most of them wait; the
    newest itself if no other waits."""
    waiting = [each for each in connections if each.waits and each is not newest]
    if not waiting:
        newest.drop()
        return
    addresses = Counter(each.address for each in waiting)
    busiest = max(addresses.values())
    from_there = (each for each in waiting if addresses[each.address] == busiest)
    min(from_there, key=_end_of_wait).drop()


def _end_of_wait(connection: HttpConnection) -> float:
    return connection.waits.when() if connection.waits else float("inf")


async def serve_http(
    app: App, listener: socket.socket, ending: anyio.Event,
    connection: type[HttpConnection] = HttpConnection,
) -> None:  # fmt: skip
    """Serve until `ending` is set; requests at work then have a second."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1,
        lifespan="on", server_header=False, proxy_headers=False,
        http=connection,  # h11, whatever else is installed: its headers are bounded
    )  # fmt: skip
    server = _Server(config)

    async def end() -> None:
        await ending.wait()
        server.should_exit = True

    async with anyio.create_task_group() as beside:
        beside.start_soon(end)
        await server.serve([listener])
        beside.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)

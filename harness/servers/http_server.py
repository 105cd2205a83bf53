"""The HTTP server: uvicorn with limits to the number of connections and to their idle time, and the
signals that end it.

uvicorn has no deadline for the header of a request, and an idle connection costs its client nothing.
So a connection is closed `_WAIT_SECONDS` after its start, or after its last answer, unless a request
on it was admitted.  At the limit of connections, a new one replaces one that waits.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

import anyio
import uvicorn
from anyio.abc import TaskStatus
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from .client_quota import HttpSettings, allow_descriptors

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_CONNECTIONS = 1000
_WAIT_SECONDS = 10.0
_FURTHER_BYTES = 64 * 1024  # bytes of requests that arrive while one runs
_ADMIT, _DROP = "cellwright.admit", "cellwright.drop"  # in the state of a request's scope


def admit(scope: Scope) -> None:
    """Stop the idle timeout of a request's connection until the request is answered."""
    noted = scope.get("state", {}).get(_ADMIT)
    if noted:
        noted()


def drop(scope: Scope) -> None:
    """Close a request's connection at once, dropping buffered data."""
    noted = scope.get("state", {}).get(_DROP)
    if noted:
        noted()


class HttpConnection(H11Protocol):
    """A connection with an idle timeout.

    Only `admit` stops the timeout.  Bytes and refused requests do not: otherwise a client without a
    token could keep the connection by sending a byte now and then.
    """

    most = MOST_CONNECTIONS
    wait_seconds = _WAIT_SECONDS

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            config, server_state, {**app_state, _ADMIT: self._stop_timer, _DROP: self.drop}, _loop
        )
        self.idle_timer: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._start_timer()
        if len(self.connections) > self.most:
            _evict_one(cast("set[HttpConnection]", self.connections), self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Go on reading while a request is at work.

        uvicorn stops once a further request has come, and would not see that the client disconnects.
        """
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            if len(self.conn.trailing_data[0]) > _FURTHER_BYTES:
                self.drop()
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.idle_timer is None:
            self._start_timer()

    def drop(self) -> None:
        """Close it at once, dropping buffered data."""
        self._stop_timer()
        self.connections.discard(self)  # otherwise the connection counts until `connection_lost`
        self.transport.abort()

    def _start_timer(self) -> None:
        self.idle_timer = self.loop.call_later(self.wait_seconds, self.drop)

    def _stop_timer(self) -> None:
        if self.idle_timer:
            self.idle_timer.cancel()
        self.idle_timer = None


def _evict_one(connections: set[HttpConnection], newest: HttpConnection) -> None:
    """Drop the connection that has been idle longest, of the address with the most idle ones; the
    newest itself if no other is idle."""
    waiting = [each for each in connections if each.idle_timer and each is not newest]
    if not waiting:
        newest.drop()
        return
    addresses = Counter(each.address for each in waiting)
    busiest = max(addresses.values())
    from_there = (each for each in waiting if addresses[each.address] == busiest)
    min(from_there, key=_deadline_of).drop()


def _deadline_of(connection: HttpConnection) -> float:
    return connection.idle_timer.when() if connection.idle_timer else float("inf")


async def serve_http(
    app: App, listener: socket.socket, ending: anyio.Event,
    connection: type[HttpConnection] = HttpConnection,
) -> None:  # fmt: skip
    """Serve until `ending` is set; running requests then have a second."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1,
        lifespan="on", server_header=False, proxy_headers=False,
        http=connection,  # h11 even if httptools is installed: h11 bounds headers
    )  # fmt: skip
    # Quiet, because each invalid request of a client without a token would write a line to the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _Server(config)

    async def end() -> None:
        await ending.wait()
        server.should_exit = True

    async with anyio.create_task_group() as beside:
        beside.start_soon(end)
        await server.serve([listener])
        beside.cancel_scope.cancel()


async def serve_at(
    place: HttpSettings, make_app: Callable[[], App], announce: Callable[[str], Iterable[str]],
    ending: anyio.Event,
) -> None:  # fmt: skip
    """Serve at an address until `ending` is set; `announce` returns the lines for stderr that tell of
    its URL.  The application is made within the event loop."""
    allow_descriptors()
    with listening(place.host, place.port) as listener:
        app = make_app()
        for line in announce(url_of(listener)):
            print(line, file=sys.stderr, flush=True)
        with anyio.CancelScope(shield=True):
            await serve_http(app, listener, ending)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `until_signalled` has them."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def url_of(listener: socket.socket) -> str:
    """Return the URL of the address at which a socket listens."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    # Connections inherit it (tcp(7)).  asyncio sets it only if the listener names IPPROTO_TCP, which
    # create_server does not: an answer of two writes then waits 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def until_signalled(serve: Callable[[anyio.Event], Awaitable[None]]) -> None:
    """Serve to the end; a signal sets the event that `serve` gets, and cancels unshielded work.

    Signals are handled before `serve` begins, because one may come as soon as the server has printed
    its address.
    """
    ending = anyio.Event()

    async def listen(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            task_status.started()
            async for _ in signals:
                ending.set()
                scope.cancel()

    async with anyio.create_task_group() as beside:
        await beside.start(listen, beside.cancel_scope)
        await serve(ending)
        beside.cancel_scope.cancel()

"""The life of the MCP server, over a pipe or over HTTP, from start to signal or end of input."""

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from mcp.server import Server

from ...runs.durable_runs import Runs
from ..descriptors import allow_descriptors
from .clients import PIPE
from .http_app import PATH, app_of
from .http_server import listening, serve_http
from .server import McpServer
from .services import ServicesByClient
from .sessions import OwnedSessions
from .stdio import serve_stdio
from .streams import StdioStreams
from .tokens import HttpSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(
    services: ServicesByClient, sessions: OwnedSessions, runs: Runs, place: HttpSettings | StdioStreams,
    *, open_world: bool = False,
) -> None:  # fmt: skip
    """Serve over HTTP, or over a pipe until the client closes it; a signal ends either.

    `open_world` tells clients that some tools act outside this host.
    """
    server = McpServer(services, sessions, runs, open_world=open_world).server()
    if isinstance(place, StdioStreams):
        services.of(PIPE.client)  # the one client needs it at once
        anyio.run(_until_signalled, lambda ending: serve_stdio(server, place))
        return
    anyio.run(_until_signalled, lambda ending: _over_http(server, sessions, place, ending))


async def _until_signalled(serve: Callable[[anyio.Event], Awaitable[None]]) -> None:
    """Serve to the end; a signal ends a pipe at once, and HTTP with its grace period."""
    ending = anyio.Event()

    async def listen(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            async for _ in signals:
                ending.set()
                scope.cancel()

    async with anyio.create_task_group() as beside:
        beside.start_soon(listen, beside.cancel_scope)
        await serve(ending)
        beside.cancel_scope.cancel()


async def _over_http(
    server: Server[Any], sessions: OwnedSessions, place: HttpSettings, ending: anyio.Event
) -> None:
    allow_descriptors()
    with listening(place.host, place.port) as listener:
        app = app_of(server, place.tokens, place.hosts, place.origins, sessions.close_all)
        host, port, *_ = listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        _report(f"cellwright: serving MCP at http://{shown}:{port}{PATH}")
        if place.made:
            _report(f"cellwright: token {place.made}")
        with anyio.CancelScope(shield=True):
            await serve_http(app, listener, ending)


def _report(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

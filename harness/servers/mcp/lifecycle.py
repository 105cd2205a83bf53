"""The server from start to end, over a pipe or over HTTP."""

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
from .place import HttpSettings
from .server import McpServer
from .services import ServicesByClient
from .sessions import OwnedSessions
from .stdio import serve_pipes
from .streams import StdioStreams

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(
    services: ServicesByClient, sessions: OwnedSessions, runs: Runs, place: HttpSettings | StdioStreams,
    *, open_world: bool = False,
) -> None:  # fmt: skip
    """Serve over HTTP at a place, or over a pipe until the client closes it; a signal ends either.

    `open_world` tells clients that some of what can be called acts outside this host.
    """
    server = McpServer(services, sessions, runs, open_world=open_world).server()
    if isinstance(place, StdioStreams):
        services.of(PIPE.client)  # whoever is there will want it at once
        anyio.run(_until_signalled, lambda ending: serve_pipes(server, place))
        return
    anyio.run(_until_signalled, lambda ending: _over_http(server, sessions, place, ending))


async def _until_signalled(serve: Callable[[anyio.Event], Awaitable[None]]) -> None:
    """Serve to the end; a signal ends a pipe at once, and HTTP in its order."""
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
        _say(f"cellwright: serving MCP at http://{shown}:{port}{PATH}")
        if place.made:
            _say(f"cellwright: token {place.made}")
        with anyio.CancelScope(shield=True):
            await serve_http(app, listener, ending)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

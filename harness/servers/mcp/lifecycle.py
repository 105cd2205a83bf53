"""The life of the MCP server, over a pipe or over HTTP, from start to signal or end of input."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from mcp.server import Server

from ....policies.errors import CellwrightError
from ....policies.languages import language_names
from ....runner.threads import begin
from ...runs.durable_runs import Runs
from ..descriptors import allow_descriptors
from ..http_server import App, listening, serve_http, url_of
from ..owned_sessions import OwnedSessions
from ..services import ServicesByClient
from ..signals import until_signalled
from ..tokens import HttpSettings
from .clients import PIPE
from .http_app import PATH, app_of
from .server import McpServer
from .stdio import serve_stdio
from .streams import StdioStreams


def run(
    services: ServicesByClient, sessions: OwnedSessions, runs: Runs, place: HttpSettings | StdioStreams,
    *, open_world: bool = False, around: Callable[[App], App] | None = None,
    languages: Sequence[str] = language_names(),
) -> None:  # fmt: skip
    """Serve over HTTP, or over a pipe until the client closes it; a signal ends either.

    `open_world` tells clients that some tools act outside this host.  `around` wraps the application of
    HTTP.  `languages` are those that the host can run.
    """
    server = McpServer(
        services, sessions, runs, open_world=open_world, languages=languages
    ).server()
    try:
        if isinstance(place, StdioStreams):
            # The one client needs it at once; its handshake does not wait for it.
            begin("cellwright-warm-up", lambda: _warm_up(services))
            anyio.run(until_signalled, lambda ending: serve_stdio(server, place))
            return
        anyio.run(
            until_signalled, lambda ending: _over_http(server, sessions, place, ending, around)
        )
    finally:
        sessions.discard_paused()


def _warm_up(services: ServicesByClient) -> None:
    """Start the cells of the client; its first request raises what this does not."""
    with contextlib.suppress(CellwrightError):
        services.of(PIPE.client)


async def _over_http(
    server: Server[Any], sessions: OwnedSessions, place: HttpSettings, ending: anyio.Event,
    around: Callable[[App], App] | None,
) -> None:  # fmt: skip
    allow_descriptors()
    with listening(place.host, place.port) as listener:
        app = app_of(server, place.tokens, place.hosts, place.origins, sessions.close_all)
        app = around(app) if around else app
        _report(f"cellwright: serving MCP at {url_of(listener)}{PATH}")
        if place.made:
            _report(f"cellwright: token {place.made}")
        with anyio.CancelScope(shield=True):
            await serve_http(app, listener, ending)


def _report(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

"""The life of the web server, from start to signal."""

import sys
from collections.abc import Callable

import anyio

from ..descriptors import allow_descriptors
from ..http_server import App, listening, serve_http, url_of
from ..signals import until_signalled
from ..tokens import HttpSettings


def run(make_app: Callable[[], App], place: HttpSettings) -> None:
    """Serve until a signal; running requests then have a second."""
    anyio.run(until_signalled, lambda ending: _serve(make_app(), place, ending))


async def _serve(app: App, place: HttpSettings, ending: anyio.Event) -> None:
    allow_descriptors()
    with listening(place.host, place.port) as listener:
        _report(f"cellwright: serving at {url_of(listener)}")
        if place.made:
            _report(f"cellwright: token {place.made}")
        fragment = f"#token={place.made}" if place.made else ""
        _report(f"cellwright: dashboard {url_of(listener)}/{fragment}")
        with anyio.CancelScope(shield=True):
            await serve_http(app, listener, ending)


def _report(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

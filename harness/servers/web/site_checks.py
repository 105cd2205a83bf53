"""Checks before a token is read: the name of this server, and the page that sends a request.

A web page in a browser on this host can reach the loopback.  The name in Host stops pages whose own
name resolves to the loopback (DNS rebinding), and Origin stops all other foreign pages.
"""

import re
from collections.abc import Sequence

from starlette.responses import Response

from ..http_access import header, own_origins
from ..http_server import App, Receive, Scope, Send

_PORT = re.compile(r":[0-9]{1,5}\Z")
_FOREIGN = ("cross-site", "same-site")  # of Sec-Fetch-Site; same-site is another port, too
_METHODS = "GET, POST, PUT, DELETE"
_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, mcp-protocol-version, "
    "mcp-session-id"
)
_PREFLIGHT_SECONDS = "600"


class SiteChecks:
    """ASGI middleware that refuses requests to foreign names and requests of foreign pages.

    `hosts` are the names of this server, without ports; `origins` are the pages that may connect
    besides our own.
    """

    def __init__(self, app: App, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = {each.lower() for each in hosts}
        self._origins = {each.encode() for each in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = _origin(scope)
        if _PORT.sub("", header(scope, b"host").lower()) not in self._hosts:
            answer: App = Response("unknown host: name it with --remote\n", 421)
        elif not self._is_ours(scope, origin):
            answer = Response("pages of this origin may not connect\n", 403)
        elif origin in self._origins and scope["method"] == "OPTIONS":
            answer = Response(status_code=204, headers=_preflight(origin))
        elif origin in self._origins:
            answer, send = self._app, _readable_by(origin, send)
        else:
            answer = self._app
        await answer(scope, receive, send)

    def _is_ours(self, scope: Scope, origin: bytes) -> bool:
        """Tell whether a request comes from our own page, from an allowed one, or from no page."""
        if origin:
            return origin in self._origins or origin in own_origins(dict(scope["headers"]))
        return header(scope, b"sec-fetch-site") not in _FOREIGN  # a picture or a link has no Origin


def _origin(scope: Scope) -> bytes:
    """Return the origin of a request: b"" for none, and one that nobody may have for several."""
    found = [value for key, value in scope["headers"] if key == b"origin"]
    return found[0] if len(found) == 1 else b", ".join(found)


def _preflight(origin: bytes) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin.decode(), "vary": "origin",
        "access-control-allow-methods": _METHODS, "access-control-allow-headers": _HEADERS,
        "access-control-max-age": _PREFLIGHT_SECONDS,
    }  # fmt: skip


def _readable_by(origin: bytes, send: Send) -> Send:
    """Return `send` that lets a page of an allowed origin read the answer."""

    async def with_header(message: Scope) -> None:
        if message["type"] == "http.response.start":
            allowed = [
                (b"access-control-allow-origin", origin), (b"vary", b"origin"),
                (b"access-control-expose-headers", b"mcp-session-id"),
            ]  # fmt: skip
            message = {**message, "headers": [*message.get("headers", ()), *allowed]}
        await send(message)

    return with_header

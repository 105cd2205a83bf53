"""The application: E2B's control interface and the ports of its sandboxes, behind checks of tokens.

One listener serves both, as `E2B_API_URL` and `E2B_SANDBOX_URL`: a request to a sandbox names it, and
its port, in headers.  Nothing that comes from a cell is decoded here.
"""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.routing import Route, Router

from ..http_access import AccessLimits, AccessMiddleware, header
from ..http_server import App, Receive, Scope, Send
from ..tokens import Tokens
from ..web.site_checks import SiteChecks
from .access import (
    KEY_HEADER,
    PORT_HEADER,
    SANDBOX_HEADER,
    TOKEN_HEADERS,
    Credentials,
    E2bTokens,
    is_for_sandbox,
)
from .answers import MOST_BODY, Handler, answering, not_found
from .cell import CODE_PORT
from .control import CONTROL
from .ports import CODE, of_port
from .sandboxes import E2bSandboxes


def e2b_app(
    sandboxes: E2bSandboxes, tokens: Tokens, hosts: Sequence[str], origins: Sequence[str] = ()
) -> App:
    """Return the whole application; `hosts` are the names of this server, `origins` the web pages that
    may connect."""
    known = E2bTokens(tokens, sandboxes)
    once = (SANDBOX_HEADER, PORT_HEADER, KEY_HEADER, *TOKEN_HEADERS)
    limits = AccessLimits(
        body_bytes=MOST_BODY, held_bytes=8 * MOST_BODY, held_bytes_per_client=4 * MOST_BODY
    )
    app: App = AccessMiddleware(_Dispatcher(sandboxes), known, limits, once)
    return SiteChecks(Credentials(app, known, sandboxes), hosts, origins)


class _Dispatcher:
    """Answers an admitted request: of the control interface, of code contexts, or of a port."""

    def __init__(self, sandboxes: E2bSandboxes) -> None:
        self._control = _router(CONTROL, sandboxes)
        self._code = _router(CODE, sandboxes)
        self._port = answering(of_port, sandboxes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)  # lifespan; there are no websockets
        elif not is_for_sandbox(scope):
            await self._control(scope, receive, send)
        elif header(scope, PORT_HEADER) == str(CODE_PORT):
            await self._code(scope, receive, send)
        else:
            answer = await self._port(Request(scope, receive, send))
            await answer(scope, receive, send)


def _router(handlers: Mapping[tuple[str, str], Handler], sandboxes: E2bSandboxes) -> Router:
    routes = [
        Route(path, answering(handler, sandboxes), methods=[method])
        for (method, path), handler in handlers.items()
    ]
    return Router(routes, default=not_found)

"""The application: every endpoint and page behind the checks of host, origin, token and limits."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.routing import Route, Router

from ....policies.errors import PolicyError
from ...version import installed_version
from ..http_access import AccessMiddleware
from ..http_server import App, Receive, Scope, Send
from .approval_endpoints import APPROVAL_ENDPOINTS
from .code_endpoint import CODE_ENDPOINTS
from .dashboard_endpoints import DASHBOARD_ENDPOINTS
from .dispatch import Dispatcher, refusal
from .endpoint import Endpoint, WebCall
from .execution_endpoints import EXECUTION_ENDPOINTS
from .messages import ServerAnswer
from .openapi import openapi_document
from .pages import PagesFirst
from .problems import RequestRefused
from .run_endpoints import RUN_ENDPOINTS
from .session_endpoints import SESSION_ENDPOINTS
from .site_checks import SiteChecks
from .state import WebState
from .task_endpoints import TASK_ENDPOINTS
from .tool_endpoints import TOOL_ENDPOINTS

Wrapper = Callable[[App], App]


def describe(call: WebCall) -> ServerAnswer:
    """Tell a client about this server."""
    sandbox = call.state.services.ceiling
    return ServerAnswer(
        version=installed_version() or "", policy=sandbox.policy.name, layers=sandbox.layers,
        client=call.client, is_operator=call.is_operator,
    )  # fmt: skip


def document(call: WebCall) -> dict[str, Any]:
    """Return the OpenAPI document."""
    return openapi_document(ENDPOINTS)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/v1/server", "Describe this server.", ServerAnswer, handler=describe),
    Endpoint("GET", "/v1/openapi.json", "Return this document.", dict, handler=document),
    *CODE_ENDPOINTS,
    *EXECUTION_ENDPOINTS,
    *DASHBOARD_ENDPOINTS,
    *SESSION_ENDPOINTS,
    *TOOL_ENDPOINTS,
    *RUN_ENDPOINTS,
    *APPROVAL_ENDPOINTS,
    *TASK_ENDPOINTS,
)


def web_app(
    state: WebState, hosts: Sequence[str], origins: Sequence[str] = (), *,
    endpoints: Sequence[Endpoint] = ENDPOINTS, pages: Mapping[str, App] | None = None,
    around: Sequence[Wrapper] = (),
) -> App:  # fmt: skip
    """Return the whole application.

    `hosts` are the names of this server, `origins` the pages of others that may connect.  `pages` are
    answered without a token, by their exact path: they hold no data, and ask for it with a token.
    `around` are ASGI middlewares around everything, the first outermost.
    """
    if state.services.ceiling.privacy:
        raise PolicyError(
            f"policy {state.services.ceiling.policy.name!r}: privacy is not available in a web server",
            "make a Sandbox in the process that holds the personal data",
        )
    dispatcher = Dispatcher(state)
    by_path: dict[str, dict[str, App]] = {}
    for each in endpoints:
        by_path.setdefault(each.path, {})[each.method] = dispatcher.app_of(each)
    routes = [_route(path, ByMethod(apps)) for path, apps in by_path.items()]
    app: App = Router(routes, redirect_slashes=False, default=_not_found)
    app = AccessMiddleware(app, state.tokens, state.limits.access, [b"idempotency-key"])
    app = SiteChecks(PagesFirst(pages or {}, app), hosts, origins)
    for wrap in reversed(around):
        app = wrap(app)
    return app


class ByMethod:
    """The ASGI application of one path."""

    def __init__(self, apps: Mapping[str, App]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the endpoint of the request's method."""
        if app := self._apps.get(scope["method"]):
            await app(scope, receive, send)
            return
        error = RequestRefused(405, "invalid", f"the methods of this path: {', '.join(self._apps)}")
        await refusal(error, allow=", ".join(self._apps))(scope, receive, send)


def _route(path: str, app: App) -> Route:
    """Return a route of exactly that path: Starlette's `$` also matches before a last line feed, and
    its `.` matches none, which the name of a file may have."""
    route = Route(path, app)
    exact = route.path_regex.pattern.removesuffix("$") + r"\Z"
    route.path_regex = re.compile(exact, re.DOTALL)
    return route


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    error = RequestRefused(404, "not_found", "no such path", "GET /v1/openapi.json lists all")
    await refusal(error)(scope, receive, send)

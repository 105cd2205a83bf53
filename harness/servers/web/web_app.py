"""The application: every endpoint and page behind the checks of host, origin, token and limits; and its
OpenAPI document (3.1), made from the endpoints and the types of their bodies.

The dashboard's page is fixed content that is served without a token, so it holds no data of clients. It
asks the endpoints for data, with a token that its user gives it.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from starlette.responses import Response
from starlette.routing import Route, Router

from ....policies.errors import PolicyError
from ....runner.audit.verification import verify
from ...dashboard import overview as overview_sources
from ...dashboard.dashboard_page import encoded, live_page, policy
from ...dashboard.overview import Chain, Gauge, Overview
from ...version import NAME, installed_version
from ..client_quota import HttpSettings
from ..http_access import AccessMiddleware, SiteChecks
from ..http_server import App, Receive, Scope, Send, serve_at, until_signalled
from .dispatch import Dispatcher, refusal
from .endpoint import Endpoint, Problem, RequestRefused, WebCall, WebState
from .execution_endpoints import CODE_ENDPOINTS, EXECUTION_ENDPOINTS, SESSION_ENDPOINTS
from .task_endpoints import TASK_ENDPOINTS
from .tool_endpoints import APPROVAL_ENDPOINTS, RUN_ENDPOINTS, TOOL_ENDPOINTS, visible_approvals
from .web_messages import ServerAnswer, ServerLanguage, WebAnswer


class CheckedChain(WebAnswer, frozen=True):
    """The chain of the trail, as it was read at `at`."""

    at: float
    state: str
    records: int
    head_seq: int
    head_hash: str
    broken: str


def overview(call: WebCall) -> msgspec.Raw:
    """Return everything that the page shows."""
    state = call.state
    shown = Overview(
        source="server", name=f"cellwright {installed_version() or ''}".strip(), made=time.time()
    )
    shown.chain = _chain(call)
    shown.gauges = _gauges(call)
    overview_sources.add_runs(shown, state.runs)
    overview_sources.add_waiting(
        shown, [(each.waiting, each.client) for each in visible_approvals(call)]
    )
    overview_sources.add_cells(shown)
    overview_sources.add_tools(shown, state.services.registry)
    if state.agents:
        agents = state.agents.made().values()
        overview_sources.add_curve(shown, [(each.factory.registry, each.memory) for each in agents])
    if state.services.skills:
        overview_sources.add_skills(shown, state.services.skills)
    if state.dashboard:
        state.dashboard.timeline.fill(shown)
    return msgspec.Raw(encoded(shown))


def _gauges(call: WebCall) -> list[Gauge]:
    states = [each.sandbox._state() for each in call.state.services.made()]
    pools = [each for state in states for each in state.supervisors]
    memory = [each.memory_bytes for each in pools if each.memory_bytes is not None]
    gauges = [
        Gauge(
            name="Cells ready", value=sum(each.ready for each in pools),
            most=sum(each.wanted for each in pools),
        ),
        Gauge(
            name="Programs running", value=sum(each.running for each in pools),
            most=call.state.limits.executions_of_all,
        ),
        Gauge(name="Calls waiting for a cell", value=sum(each.waiting for each in pools)),
        Gauge(name="Open sessions", value=sum(state.sessions for state in states)),
    ]  # fmt: skip
    return [*gauges, Gauge(name="Memory", value=sum(memory), unit="bytes")] if memory else gauges


def _chain(call: WebCall) -> Chain | None:
    audit = call.state.services.ceiling.audit
    if audit is None:
        return None
    seq, found = audit.head
    return Chain(
        state="unchecked" if found else "memory",
        records=seq,
        first=1,
        head_seq=seq,
        head_hash=found,
    )


def check_chain(call: WebCall) -> CheckedChain:
    """Read the whole trail and check its chain."""
    known = call.state.dashboard
    if known is None or known.trail is None:
        raise RequestRefused(
            404, "not_found", "this server writes no trail", "start it with --audit"
        )
    at, verdict = time.time(), verify(known.trail)
    if not verdict.ok:  # the file may have been rotated meanwhile
        at, verdict = time.time(), verify(known.trail)
    return CheckedChain(
        at=at, state="intact" if verdict.ok else "broken", records=verdict.records,
        head_seq=verdict.head[0], head_hash=verdict.head[1], broken=verdict.broken,
    )  # fmt: skip


DASHBOARD_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET", "/v1/dashboard", "Everything that the dashboard shows.", Overview,
        handler=overview, needs_operator=True,
    ),
    Endpoint(
        "GET", "/v1/dashboard/chain", "Check the chain of the audit trail.", CheckedChain,
        handler=check_chain, needs_operator=True,
    ),
)  # fmt: skip


def dashboard_pages() -> dict[str, App]:
    """Return the page by its path."""
    return {"/": page(live_page(), "text/html; charset=utf-8", policy("'self'"))}


_HEADERS = {
    "cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
# No inline script or style, except those whose hashes the page names.
OWN_FILES_ONLY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(data: bytes, media_type: str, security_policy: str = OWN_FILES_ONLY) -> App:
    """Return an app that answers GET and HEAD with `data`; `security_policy` is its
    Content-Security-Policy."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = _HEADERS | {"content-security-policy": security_policy}
        if scope["method"] not in ("GET", "HEAD"):
            found = Response(status_code=405, headers=headers | {"allow": "GET, HEAD"})
        else:
            found = Response(data, 200, headers, media_type)
        await found(scope, receive, send)

    return answer


class PagesFirst:
    """ASGI middleware that answers the paths of pages itself."""

    def __init__(self, pages: Mapping[str, App], app: App) -> None:
        self._pages = pages
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the page of the exact path, else pass the request on."""
        is_page = scope["type"] == "http" and scope["path"] in self._pages
        app = self._pages[scope["path"]] if is_page else self._app
        await app(scope, receive, send)


Wrapper = Callable[[App], App]


def describe(call: WebCall) -> ServerAnswer:
    """Tell a client about this server."""
    sandbox = call.state.services.ceiling
    here = [each for each in sandbox.languages() if not each.missing]
    return ServerAnswer(
        version=installed_version() or "", policy=sandbox.policy.name, layers=sandbox.layers,
        languages=tuple(ServerLanguage(name=each.name, kind=each.kind) for each in here),
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


def run(make_app: Callable[[], App], place: HttpSettings) -> None:
    """Serve until a signal; running requests then have a second."""
    anyio.run(until_signalled, partial(serve_at, place, make_app, partial(_announced, place.made)))


def _announced(token: str, url: str) -> list[str]:
    """Return the text that the server prints when it listens; `token`: the token that it made, if
    any."""
    lines = [f"cellwright: serving at {url}", *([f"cellwright: token {token}"] if token else [])]
    return [*lines, f"cellwright: dashboard {url}/{f'#token={token}' if token else ''}"]


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


_REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "description": "The same key with the same body gets the same answer, for ten minutes.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}  # fmt: skip


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document."""
    types = {each for endpoint in endpoints for each in (endpoint.takes, endpoint.gives)}
    structs = sorted(types - {None, bytes}, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components([*structs, Problem], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each)
    document = {
        "openapi": "3.1.0",
        "info": {"title": NAME, "version": installed_version() or "0"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return plain  # tuples become lists, because fields have tuples as defaults


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": _reference(Problem)}}
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint)],
        "responses": {
            str(endpoint.status): _success(endpoint),
            "default": {"description": "A problem.", "content": problem},
        },
    }
    if endpoint.method == "POST" and not endpoint.stream:
        operation["parameters"].append(_KEY)
    if endpoint.takes is bytes:
        operation["requestBody"] = {"required": True, "content": _BINARY}
    elif endpoint.takes:
        content = {"application/json": {"schema": _reference(endpoint.takes)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _success(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.stream:
        words = "Events; the data of each is JSON."
        if endpoint.gives:
            words += f" That of the last, `result`, is a {endpoint.gives.__name__}."
        return {
            "description": words,
            "content": {"text/event-stream": {}},
        }
    if endpoint.gives is None:
        return {"description": "Done."}
    if endpoint.gives is bytes:
        return {"description": "The file.", "content": _BINARY}
    if endpoint.gives is dict:
        return {
            "description": "Done.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    return {
        "description": "Done.",
        "content": {"application/json": {"schema": _reference(endpoint.gives)}},
    }


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(endpoint.path)
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    schema = msgspec.json.schema(endpoint.query)["$defs"][endpoint.query.__name__]
    return [
        {"name": name, "in": "query", "required": False, "schema": each}
        for name, each in schema["properties"].items()
    ]


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}

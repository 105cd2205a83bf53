"""The application of `cellwright judge`: the routes of every dialect behind the checks of host, origin,
token and limits."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..client_quota import HttpSettings, Tokens
from ..http_access import MIB, AccessLimits, AccessMiddleware, SiteChecks, header
from ..http_server import App, Receive, Scope, Send, serve_at, until_signalled
from .judge0 import Judge0
from .judging_core import MOST_BODY, DialectError, JudgingCore, answer
from .own_dialect import OwnDialect
from .piston import Piston
from .sandbox_fusion import SandboxFusion

JUDGE_LIMITS = AccessLimits(
    body_bytes=MOST_BODY, held_bytes=2048 * MIB, held_bytes_per_client=2048 * MIB,
    requests_per_client=1000,
)  # fmt: skip
_Handler = Callable[[Request], Awaitable[Response]]


def judge_app(
    core: JudgingCore, tokens: Tokens, hosts: Sequence[str], open_token: str = "",
    around: Callable[[App], App] = lambda app: app,
) -> App:  # fmt: skip
    """Return the whole application; with `open_token` every request is one of its client.

    `around` is a middleware that sees no token in a path.
    """
    own, fusion, piston, judge0 = OwnDialect(core), SandboxFusion(core), Piston(core), Judge0(core)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            judge0.tasks = tasks
            yield
            tasks.cancel_scope.cancel()

    def route(path: str, handler: _Handler, method: str = "GET") -> Route:
        return Route(path, partial(_answered, handler), methods=[method])

    app: App = Starlette(
        routes=[
            route("/", own.page),
            route("/v1/judge", own.judge, "POST"),
            route("/v1/languages", own.languages),
            route("/v1/status", own.status),
            route("/run_code", fusion.run_code, "POST"),
            route("/run_jupyter", fusion.run_jupyter, "POST"),
            route("/api/v2/runtimes", piston.runtimes),
            route("/api/v2/execute", piston.execute, "POST"),
            route("/submissions", judge0.submit, "POST"),
            route("/submissions/batch", judge0.submit_batch, "POST"),
            route("/submissions/batch", judge0.get_batch),
            route("/submissions/{token}", judge0.get),
            route("/languages", judge0.languages),
            route("/languages/{id:int}", judge0.language),
            route("/about", judge0.about),
            route("/statuses", judge0.statuses),
            route("/config_info", judge0.config_info),
        ],
        lifespan=lifespan,
    )
    app = AccessMiddleware(app, tokens, JUDGE_LIMITS)
    return TokenFromElsewhere(around(SiteChecks(app, hosts, ())), open_token)


class TokenFromElsewhere:
    """ASGI middleware that finds a token where clients of the dialects can put it.

    Judge0's clients send X-Auth-Token.  verl's know nothing but a URL, so a path may begin with
    /token/TOKEN.
    """

    def __init__(self, app: App, open_token: str) -> None:
        self._app = app
        self._open_token = open_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its token in Authorization."""
        if scope["type"] == "http":
            scope = self._with_token(scope)
        await self._app(scope, receive, send)

    def _with_token(self, scope: Scope) -> Scope:
        token, path = self._open_token or header(scope, b"x-auth-token"), scope["path"]
        if path.startswith("/token/"):
            given, _, rest = path.removeprefix("/token/").partition("/")
            token, scope = token or given, {**scope, "path": f"/{rest}", "raw_path": None}
        if not token:
            return scope
        others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", f"Bearer {token}".encode())]}


async def _answered(handler: _Handler, request: Request) -> Response:
    try:
        return await handler(request)
    except DialectError as error:
        return answer({"message": str(error), "error": str(error)}, error.status)


def run(
    core: JudgingCore, place: HttpSettings, open_token: str, around: Callable[[App], App]
) -> None:
    """Serve until a signal."""

    def announced(url: str) -> list[str]:
        lines = [f"cellwright: serving at {url}"]
        if not open_token and place.made:
            lines += [f"cellwright: token {place.made}", f"cellwright: or {url}/token/{place.made}"]
        return lines

    def make() -> App:
        return judge_app(core, place.tokens, place.hosts, open_token, around)

    anyio.run(until_signalled, partial(serve_at, place, make, announced))

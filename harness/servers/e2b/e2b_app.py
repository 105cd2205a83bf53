"""The application: E2B's control interface and the ports of its sandboxes, behind checks of tokens.

One listener serves both, as `E2B_API_URL` and `E2B_SANDBOX_URL`: a request to a sandbox names it, and
its port, in headers.  Nothing that comes from a cell is decoded here.
"""

import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ....policies.errors import CellwrightError
from ....policies.policy import Policy
from ...sandbox.sandbox import Sandbox
from ..client_quota import CLIENT, HttpSettings, Tokens
from ..http_access import AccessLimits, AccessMiddleware, SiteChecks, header, run_in_thread
from ..http_server import App, Receive, Scope, Send, serve_at, until_signalled
from . import access
from .control_messages import (
    DEFAULT_SECONDS,
    E2bNetwork,
    Lifetime,
    NewForks,
    NewSandbox,
    NewSnapshot,
)
from .e2b_cell import CODE_PORT
from .e2b_sandboxes import E2bLimits, E2bSandbox, E2bSandboxes
from .ports import CODE, of_port


def e2b_app(
    sandboxes: E2bSandboxes, tokens: Tokens, hosts: Sequence[str], origins: Sequence[str] = ()
) -> App:
    """Return the whole application; `hosts` are the names of this server, `origins` the web pages that
    may connect."""
    known = access.E2bTokens(tokens, sandboxes)
    once = (access.SANDBOX_HEADER, access.PORT_HEADER, access.KEY_HEADER, *access.TOKEN_HEADERS)
    limits = AccessLimits(
        body_bytes=access.MOST_BODY,
        held_bytes=8 * access.MOST_BODY,
        held_bytes_per_client=4 * access.MOST_BODY,
    )
    app: App = AccessMiddleware(_Dispatcher(sandboxes), known, limits, once)
    return SiteChecks(access.Credentials(app, known, sandboxes), hosts, origins)


def run(
    policy: Policy,
    open_sandbox: Callable[[Policy], Sandbox],
    place: HttpSettings,
    limits: E2bLimits,
) -> None:
    """Serve until a signal; then all sandboxes end."""
    anyio.run(until_signalled, partial(_serve, policy, open_sandbox, place, limits))


async def _serve(
    policy: Policy, open_sandbox: Callable[[Policy], Sandbox], place: HttpSettings, limits: E2bLimits,
    ending: anyio.Event,
) -> None:  # fmt: skip
    sandboxes = E2bSandboxes(policy, open_sandbox, limits)
    app = e2b_app(sandboxes, place.tokens, place.hosts, place.origins)

    def announce(url: str) -> Iterator[str]:
        yield f"cellwright: serving E2B's interface under {policy.name}; for its clients:"
        yield f"export E2B_API_URL={url} E2B_SANDBOX_URL={url}"
        if place.made:
            yield f"export E2B_API_KEY={place.made}"

    with anyio.CancelScope(shield=True):
        try:
            await serve_at(place, lambda: app, announce, ending)
        finally:
            await sandboxes.close()


class _Dispatcher:
    """Answers an admitted request: of the control interface, of code contexts, or of a port."""

    def __init__(self, sandboxes: E2bSandboxes) -> None:
        self._control = _router(CONTROL, sandboxes)
        self._code = _router(CODE, sandboxes)
        self._port = access.answering(of_port, sandboxes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)  # lifespan; there are no websockets
        elif not access.is_for_sandbox(scope):
            await self._control(scope, receive, send)
        elif header(scope, access.PORT_HEADER) == str(CODE_PORT):
            await self._code(scope, receive, send)
        else:
            answer = await self._port(Request(scope, receive, send))
            await answer(scope, receive, send)


def _router(handlers: Mapping[tuple[str, str], access.Handler], sandboxes: E2bSandboxes) -> Router:
    routes = [
        Route(path, access.answering(handler, sandboxes), methods=[method])
        for (method, path), handler in handlers.items()
    ]
    return Router(routes, default=access.not_found)


_LISTED = 100
_LATEST = 1 << 62


def _named(request: Request, sandboxes: E2bSandboxes) -> E2bSandbox:
    id = request.path_params["id"]
    found = sandboxes.find(id, request.scope[CLIENT])
    if found is None:
        raise access.E2bRefusal(404, f"sandbox {id[:64]!r} not found")
    return found


async def _create(request: Request, sandboxes: E2bSandboxes) -> Response:
    made = await sandboxes.make(request.scope[CLIENT], await access.read_body(request, NewSandbox))
    return access.json_answer(made.access(), 201)


async def _list(request: Request, sandboxes: E2bSandboxes) -> Response:
    query = request.query_params
    wanted = dict(urllib.parse.parse_qsl(urllib.parse.unquote(query.get("metadata", ""))))
    states = query.get("state", "running,paused").split(",")
    templates = [each for each in query.getlist("template") if each]
    after = _moment(query.get("startedAfter"))
    found = [
        told for each in sandboxes.of(request.scope[CLIENT])
        if (told := each.told())["state"] in states and wanted.items() <= told["metadata"].items()
        and (not templates or told["templateID"] in templates) and each.started_at >= after
    ]  # fmt: skip
    if query.get("order") == "asc":
        found.reverse()
    return _page(request, found)


def _moment(text: str | None) -> datetime:
    try:
        found = datetime.fromisoformat(text) if text else datetime.min
    except ValueError:
        raise access.E2bRefusal(
            400, "startedAfter: must be a time such as 2026-01-31T12:00:00Z"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _page(request: Request, found: list[dict[str, Any]]) -> Response:
    query = request.query_params
    start, size = (
        access.number_of(query.get("nextToken"), 0),
        access.number_of(query.get("limit"), _LISTED),
    )
    page = found[start : start + max(1, size)]
    more = {"x-next-token": str(start + len(page))} if start + len(page) < len(found) else {}
    return access.json_answer(page, headers=more)


async def _show(request: Request, sandboxes: E2bSandboxes) -> Response:
    return access.json_answer(_named(request, sandboxes).told())


async def _kill(request: Request, sandboxes: E2bSandboxes) -> Response:
    await sandboxes.kill(_named(request, sandboxes))
    return Response(status_code=204)


async def _set_timeout(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await access.read_body(request, Lifetime)
    seconds = given.timeout if given.timeout is not None else given.duration
    sandboxes.live_for(sandbox, DEFAULT_SECONDS if seconds is None else seconds)
    return Response(status_code=204)


async def _pause(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _named(request, sandboxes)
    if sandbox.is_paused:
        raise access.E2bRefusal(409, f"sandbox {sandbox.id} is paused already")
    await sandboxes.pause(sandbox)
    return Response(status_code=204)


async def _connect(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await access.read_body(request, Lifetime)
    was_paused = sandbox.is_paused
    seconds = DEFAULT_SECONDS if given.timeout is None else given.timeout
    if was_paused:
        sandboxes.resume(sandbox, seconds)
    elif given.timeout is not None:
        sandboxes.extend(sandbox, seconds)
    return access.json_answer(sandbox.access(), 201 if was_paused else 200)


async def _change_network(request: Request, sandboxes: E2bSandboxes) -> Response:
    await sandboxes.change_network(
        _named(request, sandboxes), await access.read_body(request, E2bNetwork)
    )
    return Response(status_code=204)


async def _metrics(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, query = _named(request, sandboxes), request.query_params
    start, end = (
        access.number_of(query.get("start"), 0),
        access.number_of(query.get("end"), _LATEST),
    )
    return access.json_answer(await run_in_thread(lambda: sandbox.metrics(start, end)))


async def _snapshot(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await access.read_body(request, NewSnapshot)
    return access.json_answer((await sandboxes.keep(sandbox, given.name or "")).told(), 201)


async def _snapshots(request: Request, sandboxes: E2bSandboxes) -> Response:
    query = request.query_params
    found = sandboxes.snapshots.of(
        request.scope[CLIENT], query.get("sandboxID", ""), query.get("name", "")
    )
    return _page(request, [each.told() for each in reversed(found)])


async def _delete_snapshot(request: Request, sandboxes: E2bSandboxes) -> Response:
    found = sandboxes.snapshots.find(request.scope[CLIENT], request.path_params["id"])
    if found is None:
        raise access.E2bRefusal(404, "snapshot not found; templates are not supported by cells")
    sandboxes.snapshots.delete(found)
    return Response(status_code=204)


async def _fork(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await access.read_body(request, NewForks)
    results: list[dict[str, Any]] = []
    for _ in range(given.count):
        try:
            results.append({"sandbox": (await sandboxes.fork(sandbox, given.timeout)).access()})
        except CellwrightError as error:
            results.append({"error": {"code": 429, "message": error.what}})
    return access.json_answer(results, 201)


async def _unsupported(request: Request, sandboxes: E2bSandboxes) -> Response:
    _named(request, sandboxes)
    raise access.E2bRefusal(501, f"{request.url.path.rpartition('/')[2]}: not supported by cells")


CONTROL: dict[tuple[str, str], access.Handler] = {
    ("POST", "/sandboxes"): _create,
    ("POST", "/v2/sandboxes"): _create,
    ("GET", "/sandboxes"): _list,
    ("GET", "/v2/sandboxes"): _list,
    ("GET", "/sandboxes/{id}"): _show,
    ("DELETE", "/sandboxes/{id}"): _kill,
    ("POST", "/sandboxes/{id}/timeout"): _set_timeout,
    ("POST", "/sandboxes/{id}/refreshes"): _set_timeout,
    ("POST", "/sandboxes/{id}/pause"): _pause,
    ("POST", "/sandboxes/{id}/resume"): _connect,
    ("POST", "/sandboxes/{id}/connect"): _connect,
    ("POST", "/v2/sandboxes/{id}/connect"): _connect,
    ("PUT", "/sandboxes/{id}/network"): _change_network,
    ("GET", "/sandboxes/{id}/metrics"): _metrics,
    ("POST", "/sandboxes/{id}/snapshots"): _snapshot,
    ("GET", "/snapshots"): _snapshots,
    ("DELETE", "/templates/{id}"): _delete_snapshot,
    ("POST", "/sandboxes/{id}/fork"): _fork,
    ("GET", "/sandboxes/{id}/logs"): _unsupported,
}

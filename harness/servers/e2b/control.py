"""E2B's control interface: sandboxes are made, listed, changed and killed."""

import urllib.parse
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import CellwrightError
from ..client_turns import run_in_thread
from ..tokens import CLIENT
from .answers import E2bRefusal, Handler, json_answer, number_of, read_body
from .messages import DEFAULT_SECONDS, E2bNetwork, Lifetime, NewForks, NewSandbox, NewSnapshot
from .sandboxes import E2bSandbox, E2bSandboxes

_LISTED = 100
_LATEST = 1 << 62


def _named(request: Request, sandboxes: E2bSandboxes) -> E2bSandbox:
    """Return the sandbox that a path names; raises E2bRefusal, for another client's too."""
    id = request.path_params["id"]
    found = sandboxes.find(id, request.scope[CLIENT])
    if found is None:
        raise E2bRefusal(404, f"sandbox {id[:64]!r} not found")
    return found


async def _create(request: Request, sandboxes: E2bSandboxes) -> Response:
    made = await sandboxes.make(request.scope[CLIENT], await read_body(request, NewSandbox))
    return json_answer(made.access(), 201)


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
        raise E2bRefusal(400, "startedAfter: must be a time such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _page(request: Request, found: list[dict[str, Any]]) -> Response:
    query = request.query_params
    start, size = number_of(query.get("nextToken"), 0), number_of(query.get("limit"), _LISTED)
    page = found[start : start + max(1, size)]
    more = {"x-next-token": str(start + len(page))} if start + len(page) < len(found) else {}
    return json_answer(page, headers=more)


async def _show(request: Request, sandboxes: E2bSandboxes) -> Response:
    return json_answer(_named(request, sandboxes).told())


async def _kill(request: Request, sandboxes: E2bSandboxes) -> Response:
    await sandboxes.kill(_named(request, sandboxes))
    return Response(status_code=204)


async def _set_timeout(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await read_body(request, Lifetime)
    seconds = given.timeout if given.timeout is not None else given.duration
    sandboxes.live_for(sandbox, DEFAULT_SECONDS if seconds is None else seconds)
    return Response(status_code=204)


async def _pause(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _named(request, sandboxes)
    if sandbox.is_paused:
        raise E2bRefusal(409, f"sandbox {sandbox.id} is paused already")
    await sandboxes.pause(sandbox)
    return Response(status_code=204)


async def _connect(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await read_body(request, Lifetime)
    was_paused = sandbox.is_paused
    seconds = DEFAULT_SECONDS if given.timeout is None else given.timeout
    if was_paused:
        sandboxes.resume(sandbox, seconds)
    elif given.timeout is not None:
        sandboxes.extend(sandbox, seconds)
    return json_answer(sandbox.access(), 201 if was_paused else 200)


async def _change_network(request: Request, sandboxes: E2bSandboxes) -> Response:
    await sandboxes.change_network(_named(request, sandboxes), await read_body(request, E2bNetwork))
    return Response(status_code=204)


async def _metrics(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, query = _named(request, sandboxes), request.query_params
    start, end = number_of(query.get("start"), 0), number_of(query.get("end"), _LATEST)
    return json_answer(await run_in_thread(lambda: sandbox.metrics(start, end)))


async def _snapshot(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await read_body(request, NewSnapshot)
    return json_answer((await sandboxes.keep(sandbox, given.name or "")).told(), 201)


async def _snapshots(request: Request, sandboxes: E2bSandboxes) -> Response:
    query = request.query_params
    found = sandboxes.snapshots.of(
        request.scope[CLIENT], query.get("sandboxID", ""), query.get("name", "")
    )
    return _page(request, [each.told() for each in reversed(found)])


async def _delete_snapshot(request: Request, sandboxes: E2bSandboxes) -> Response:
    found = sandboxes.snapshots.find(request.scope[CLIENT], request.path_params["id"])
    if found is None:
        raise E2bRefusal(404, "snapshot not found; templates are not supported by cells")
    sandboxes.snapshots.delete(found)
    return Response(status_code=204)


async def _fork(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _named(request, sandboxes), await read_body(request, NewForks)
    results: list[dict[str, Any]] = []
    for _ in range(given.count):
        try:
            results.append({"sandbox": (await sandboxes.fork(sandbox, given.timeout)).access()})
        except CellwrightError as error:
            results.append({"error": {"code": 429, "message": error.what}})
    return json_answer(results, 201)


async def _unsupported(request: Request, sandboxes: E2bSandboxes) -> Response:
    _named(request, sandboxes)
    raise E2bRefusal(501, f"{request.url.path.rpartition('/')[2]}: not supported by cells")


CONTROL: dict[tuple[str, str], Handler] = {
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

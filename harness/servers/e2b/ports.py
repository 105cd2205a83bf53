"""The ports of a sandbox: its code contexts, which the host answers, and servers in its cell."""

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..http_server import drop
from .access import MOST_CALL, SANDBOX_HEADER, is_stream, port_of
from .answers import MOST_BODY, E2bRefusal, Handler, body_of, json_answer, number_of, read_body
from .cell import ENVD_PORT
from .code_interpreter import CodeContext
from .messages import ExecuteCode, NewContext
from .relay import relayed
from .sandboxes import E2bSandbox, E2bSandboxes


def _reached(request: Request, sandboxes: E2bSandboxes) -> E2bSandbox:
    """Return the sandbox that a request's headers name; E2bRefusal for another token."""
    id = request.headers.get(SANDBOX_HEADER.decode(), "")
    found = sandboxes.find(id)
    token = request.headers["authorization"].partition(" ")[2]
    if found is None or sandboxes.with_token(token) is not found:
        raise E2bRefusal(502, "The sandbox was not found")  # as E2B's proxy says it
    resume = found.request.auto_resume
    if found.is_paused and resume and resume.enabled:
        sandboxes.resume(found, found.request.timeout)
    if found.is_paused:
        raise E2bRefusal(502, "The sandbox is paused and was not found: connect to it first")
    return found


async def of_port(request: Request, sandboxes: E2bSandboxes) -> Response:
    """Pass a request on to a server in the cell."""
    sandbox, port = _reached(request, sandboxes), port_of(request.scope)
    if not 0 < port < 65536:
        raise E2bRefusal(400, f"port {port}: must be from 1 to 65535")
    query = request.scope["query_string"].decode("latin-1")
    target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    body = await body_of(request, MOST_CALL if is_stream(request.scope) else MOST_BODY)
    if port == ENVD_PORT:
        seconds = number_of(request.headers.get("connect-timeout-ms"), 0) / 1000 or None
        home = sandbox.cell.home
        if answer := await sandbox.terminals.answer(request.url.path, body, home, seconds):
            return answer
    path = sandbox.cell.address_of(port)
    return await relayed(path, request.method, target, request.headers, body, request.scope)


async def _execute(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _reached(request, sandboxes), await read_body(request, ExecuteCode)
    context = sandbox.code.context_of(given)

    async def lines() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(sandbox.code.run(context, given)) as told:
            async for line in told:
                yield line
        if sandbox.code.is_killed:
            drop(request.scope)  # so that the client sees that the answer is not whole

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _contexts(request: Request, sandboxes: E2bSandboxes) -> Response:
    return json_answer(_reached(request, sandboxes).code.contexts())


async def _make_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox, given = _reached(request, sandboxes), await read_body(request, NewContext)
    return json_answer(sandbox.code.make(given.language, given.cwd).told())


def _context(request: Request, sandbox: E2bSandbox) -> CodeContext:
    found = sandbox.code.find(request.path_params["id"])
    if found is None:
        raise E2bRefusal(404, f"context {request.path_params['id'][:64]} not found")
    return found


async def _remove_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _reached(request, sandboxes)
    await sandbox.code.forget(_context(request, sandbox), is_removed=True)
    return Response(status_code=204)


async def _restart_context(request: Request, sandboxes: E2bSandboxes) -> Response:
    sandbox = _reached(request, sandboxes)
    await sandbox.code.forget(_context(request, sandbox), is_removed=False)
    return Response(status_code=204)


CODE: dict[tuple[str, str], Handler] = {
    ("POST", "/execute"): _execute,
    ("GET", "/contexts"): _contexts,
    ("POST", "/contexts"): _make_context,
    ("DELETE", "/contexts/{id}"): _remove_context,
    ("POST", "/contexts/{id}/restart"): _restart_context,
}

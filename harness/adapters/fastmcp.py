"""`CellSandboxProvider`: the sandbox of FastMCP's code mode, a fresh cell for each program."""

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.requests.result import SandboxResult
from ..sandbox.calls.background import in_thread
from ..sandbox.sandbox import Sandbox
from ..text.hidden import advice
from ..tools.broker import Broker
from .common.cell_sandbox_session import HostFunctions, missing

try:
    from fastmcp.exceptions import ToolError
except ImportError as error:
    raise missing("fastmcp", "fastmcp", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

# In the cell: the program is the body of a coroutine function, whose last expression is returned.
_PROGRAM = """
def _run(source, names):
    import ast, sys
    tree = ast.parse(source, "<program>")
    body = tree.body
    if body and isinstance(body[-1], ast.Expr):
        body[-1] = ast.copy_location(ast.Return(body[-1].value), body[-1])
    shell = ast.parse("async def program(): pass").body[0]
    shell.body = body or shell.body
    space = sys.modules["__main__"].__dict__
    exec(compile(ast.fix_missing_locations(ast.Module([shell], [])), "<program>", "exec"), space)

    def bound(tool):
        return lambda *args, **kwargs: call_tool(tool, {"args": args, "kwargs": kwargs})

    call_tool = space["call_tool"]
    space.update({name: bound(tool) for name, tool in names.items()})
    return space["program"]()

await _run(_source, _names)
"""


class CellSandboxProvider:
    """Runs the programs of `CodeMode(sandbox_provider=CellSandboxProvider())`, each in a fresh cell.

    `policy`, default the profile strict, and `options` are arguments of `Sandbox`.  `timeout`: seconds
    of each program, in which calls of tools count; default and at most that of the policy.
    Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, *, policy: "PolicyLike | None" = None, timeout: float | None = None, **options: Any
    ) -> None:
        if refused := {"tools", "connect"} & options.keys():
            raise PolicyError(
                f"{', '.join(sorted(refused))}: the functions of this provider are those of FastMCP"
            )
        self._options = {"policy": "strict" if policy is None else policy, **options}
        self._timeout = timeout
        self._functions = HostFunctions()
        self._making = asyncio.Lock()
        self._sandbox: Sandbox | None = None

    async def run(
        self,
        code: str,
        *,
        inputs: dict[str, Any] | None = None,
        external_functions: dict[str, Callable[..., Any]] | None = None,
    ) -> Any:
        """Run a program; return its return value, or that of its last expression.

        `inputs`: its variables.  `external_functions`: functions of this process, plain or async, that
        it awaits.  Cancelling the task ends the program and the functions that it waits for.
        Raises ToolError with the words of its error if it fails.
        """
        sandbox = await self._made()
        with self._offered(external_functions or {}) as names:
            given = {**(inputs or {}), "_source": code, "_names": names}
            result = await sandbox.aexecute(_PROGRAM, inputs=given, timeout=self._timeout)
        if not result.ok:
            raise ToolError(_failure(result, sandbox.policy))
        return result.value

    async def _made(self) -> Sandbox:
        async with self._making:
            if self._sandbox is None:
                broker = Broker(self._functions)
                self._sandbox = await Sandbox.create(tools=broker, **self._options)
            return self._sandbox

    @contextlib.contextmanager
    def _offered(self, functions: Mapping[str, Callable[..., Any]]) -> Any:
        """Offer functions under names that no other program can know; return these."""
        loop, waiting = asyncio.get_running_loop(), set[Future[Any]]()
        token = secrets.token_hex(8)
        names: dict[str, str] = {}
        try:
            for number, (name, function) in enumerate(functions.items()):
                call = _in_loop(loop, function, waiting)
                tool = f"host-{number}-{token}"
                names[name] = self._functions.add(tool, call, is_listed=False)
            yield names
        finally:
            for tool in names.values():
                self._functions.remove(tool)
            for each in list(waiting):
                each.cancel()

    async def aclose(self) -> None:
        """Close the sandbox; the next program makes another one."""
        async with self._making:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await in_thread(sandbox.close)


def _in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., Any], waiting: "set[Future[Any]]"
) -> Callable[[dict[str, Any]], Any]:
    """Return a function that calls `function` in this event loop from another thread."""

    async def called(args: list[Any], kwargs: dict[str, Any]) -> Any:
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def call(arguments: dict[str, Any]) -> Any:
        args, kwargs = arguments.get("args", []), arguments.get("kwargs", {})
        future = asyncio.run_coroutine_threadsafe(called(args, kwargs), loop)
        waiting.add(future)
        try:
            return future.result()
        finally:
            waiting.discard(future)

    return call


def _failure(result: SandboxResult, policy: Policy) -> str:
    notes = advice(result.notices, result.hints, policy, is_ok=result.ok)
    return "\n".join((result.error or str(result.reason), *notes))

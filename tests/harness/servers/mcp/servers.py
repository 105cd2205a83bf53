"""Servers for tests: in this process, behind a pipe, and over HTTP, and clients of each."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server
from mcp.types import CallToolResult, ElicitRequestParams, ElicitResult
from msgspec.structs import replace

from cellwright import (
    AuditLog,
    HostSettings,
    PackageStore,
    PauseSettings,
    Privacy,
    Sandbox,
    Skills,
    ToolRegistry,
    tool,
)
from cellwright.harness.runs.durable_runs import Runs
from cellwright.harness.servers.mcp.approvals import approver
from cellwright.harness.servers.mcp.mcp_server import McpServer
from cellwright.harness.servers.services import OwnedSessions, ServicesByClient, SessionLimits
from cellwright.policies.policy import Packages
from tests.conftest import OPTIONAL, ROOT, policy_named

ERAS = ("legacy", "2026-07-28")
BOUND_SECONDS = 120  # on what has no reason to take a second: a server that hangs fails its test
PAID: list[tuple[str, int]] = []

TOOLS = """
import time
from cellwright import tool

@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@tool(risky=True)
def pay(to: str, amount: int) -> str:
    "Pay somebody."
    return f"paid {amount} to {to}"
"""


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(risky=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    PAID.append((to, amount))
    return f"paid {amount} to {to}"


class Inside(NamedTuple):
    """A server in this process, and what stands behind it."""

    server: Server[Any]
    services: ServicesByClient
    sessions: OwnedSessions
    runs: Runs


@contextlib.contextmanager
def inside(
    policy: str = "strict",
    audit: AuditLog | None = None,
    skills: Skills | None = None,
    privacy: Privacy | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    packages: Packages = Packages(),  # noqa: B008 - a constant
    package_store: PackageStore | None = None,
    pauses: PauseSettings = PauseSettings(),  # noqa: B008 - a constant
    **limits: Any,
) -> Iterator[Inside]:
    """Give a server in this process that offers `add`, `pay` and `tools`."""
    bounds = SessionLimits(**limits)
    with (
        Sandbox(
            policy=replace(policy_named(policy), packages=packages),
            pool=0,
            audit=audit or False,
            privacy=privacy,
            host=HostSettings(package_store=package_store, pauses=pauses),
        ) as ceiling,
        ToolRegistry() as registry,
        Runs() as runs,
        contextlib.closing(
            ServicesByClient(ceiling, registry, approver(runs), bounds, skills=skills)
        ) as services,
    ):
        registry.register(add)
        registry.register(pay)
        for each in tools:
            registry.register(each)
        sessions = OwnedSessions(bounds)
        serving = McpServer(services, sessions, runs, open_world=False)
        yield Inside(serving.server(), services, sessions, runs)


class Person:
    """A person who always gives the same answer; `asked` are the questions that were shown."""

    def __init__(self, action: Any = "accept", content: Any = None) -> None:
        self.asked: list[str] = []
        self._answer = ElicitResult(action=action, content=content)

    async def __call__(self, context: object, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return self._answer


def yes() -> Person:
    return Person("accept", {"approve": True})


Body = Callable[[Client], Awaitable[None]]


def drive(
    connected: Callable[[], contextlib.AbstractAsyncContextManager[Client]], body: Body
) -> None:
    """Connect, and have `body` do something with the client, within bounds."""

    async def main() -> None:
        with anyio.fail_after(BOUND_SECONDS):
            async with connected() as client:
                await body(client)

    anyio.run(main)


def at(server: Server[Any], mode: str, person: Person | None = None) -> Callable[[], Client]:
    """Return what connects to a server in this process."""
    return lambda: Client(server, mode=mode, elicitation_callback=person)


async def call(client: Client, name: str, /, **arguments: Any) -> Any:
    """Return what a tool gives as a structure, after it went well."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def failing(client: Client, name: str, /, **arguments: Any) -> str:
    """Return the words of a call that did not go well."""
    result: CallToolResult = await client.call_tool(name, arguments)
    assert result.is_error, result.structured_content
    return str(getattr(result.content[0], "text", ""))


# in processes of their own

COMMAND = [sys.executable, "-m", "cellwright", "mcp"]
OPTIONS = [word for layer in OPTIONAL for word in ("--optional", layer)]


def environment() -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/"),
    }


def tools_file(directory: Path) -> Path:
    file = directory / "tools_of_ours.py"
    file.write_text(TOOLS)
    return file


def piped(
    *options: str, mode: str = "auto", person: Person | None = None, home: Path | None = None
) -> Callable[[], Any]:
    """Return what starts a server behind a pipe and connects to it."""
    own = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")} if home else {}
    parameters = StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], *OPTIONS, *options], env=environment() | own,
        cwd=ROOT,
    )  # fmt: skip
    return lambda: Client(stdio_client(parameters), mode=mode, elicitation_callback=person)


class Http(NamedTuple):
    """A server over HTTP in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def base(self) -> str:
        return self.url.removesuffix("/mcp")

    def connected(
        self, token: str, mode: str, person: Person | None = None
    ) -> Callable[[], contextlib.AbstractAsyncContextManager[Client]]:
        @contextlib.asynccontextmanager
        async def connect() -> AsyncIterator[Client]:
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx2.AsyncClient(headers=headers, timeout=BOUND_SECONDS) as http:
                transport = streamable_http_client(self.url, http_client=http)
                async with Client(transport, mode=mode, elicitation_callback=person) as client:
                    yield client

        return connect


@contextlib.contextmanager
def over_http(*options: str) -> Iterator[Http]:
    """Give a server over HTTP, and end it after."""
    command = [*COMMAND, "--http", "127.0.0.1:0", *OPTIONS, *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr
            said = process.stderr.readline()
            assert "serving MCP at http://127.0.0.1:" in said, said + process.stderr.read()
            yield Http(process, said.split()[-1])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=BOUND_SECONDS)

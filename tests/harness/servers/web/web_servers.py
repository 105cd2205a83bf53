"""Web servers for tests: in this process, on a port of the loopback, and their clients."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import httpx2

from cellwright import AuditLog, Policy, Sandbox, Skills, ToolRegistry, tool
from cellwright.agent import Agent
from cellwright.harness.agent.prompts import ChatModel
from cellwright.harness.runs.durable_runs import Runs
from cellwright.harness.servers.client_quota import Tokens
from cellwright.harness.servers.http_server import HttpConnection, listening, serve_http, url_of
from cellwright.harness.servers.services import (
    MadeByKey,
    OwnedSessions,
    ServicesByClient,
    SessionLimits,
)
from cellwright.harness.servers.web.endpoint import DashboardSources, WebLimits, WebState
from cellwright.harness.servers.web.tool_endpoints import approver
from cellwright.harness.servers.web.web_app import web_app
from tests.conftest import policy_named

ANN, BOB, EVE = (f"a-token-that-is-{name}s-alone" for name in ("ann", "bob", "eve"))
TOKENS = Tokens({"ann": ANN, "bob": BOB, "eve": EVE}, {"eve"})  # eve is an operator
HOSTS = ("127.0.0.1", "localhost")
BOUND_SECONDS = 60
PAID: list[tuple[str, int]] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(risky=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    PAID.append((to, amount))
    return f"paid {amount} to {to}"


class Web(NamedTuple):
    """A server in this process."""

    url: str
    state: WebState

    def client(self, token: str = ANN, **headers: str) -> httpx2.Client:
        """Return a client of its own connections; close it."""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return httpx2.Client(base_url=self.url, headers=headers, timeout=BOUND_SECONDS)

    def ask(self, method: str, path: str, token: str = ANN, **given: Any) -> httpx2.Response:
        with self.client(token) as client:
            return client.request(method, path, **given)

    def get(self, path: str, token: str = ANN) -> Any:
        return good(self.ask("GET", path, token))

    def post(self, path: str, body: Any = None, token: str = ANN, **headers: str) -> Any:
        return good(self.ask("POST", path, token, json=body, headers=headers))


def good(answer: httpx2.Response) -> Any:
    """Return the JSON of an answer that is no problem."""
    assert answer.is_success, (answer.status_code, answer.text)
    return answer.json() if answer.content else None


@contextlib.contextmanager
def web_server(
    policy: str | Policy = "standard", *, limits: WebLimits = WebLimits(),  # noqa: B008 - a constant
    audit: AuditLog | None = None, skills: Skills | None = None, tools: Sequence[Callable[..., Any]] = (),
    origins: Sequence[str] = (), connection: type[HttpConnection] = HttpConnection,
    sessions: SessionLimits = SessionLimits(), dashboard: DashboardSources | None = None, model: ChatModel | None = None, **given: Any,  # noqa: B008 - a constant
) -> Iterator[Web]:  # fmt: skip
    """Serve `add`, `pay` and `tools`; `given` goes to `web_app`."""
    ceiling_policy = policy_named(policy) if isinstance(policy, str) else policy
    with (
        Sandbox(policy=ceiling_policy, pool=0, audit=audit or False) as ceiling,
        ToolRegistry() as registry,
        Runs() as runs,
    ):
        for each in (add, pay, *tools):
            registry.register(each)
        running = limits.executions_of_one
        services = ServicesByClient(
            ceiling,
            registry,
            approver(runs),
            sessions,
            skills=skills,
            server="web",
            running=running,
        )
        with (
            contextlib.closing(services),
            MadeByKey(lambda _: Agent(model or "", sandbox=ceiling, tools=[add, pay])) as agents,
        ):
            state = WebState(
                services, OwnedSessions(sessions), runs, TOKENS, limits, dashboard,
                agents if model else None,
            )  # fmt: skip
            with on_port(lambda: web_app(state, HOSTS, origins, **given), connection) as url:
                yield Web(url, state)


@contextlib.contextmanager
def on_port(
    make_app: Callable[[], Any], connection: type[HttpConnection] = HttpConnection
) -> Iterator[str]:
    """Serve an app on a free port, and yield its URL."""

    async def serve(ending: anyio.Event) -> None:
        await serve_http(make_app(), listener, ending, connection)

    with (
        listening("127.0.0.1", 0) as listener,
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
    ):
        ending = portal.call(anyio.Event)
        done = portal.start_task_soon(serve, ending)
        yield url_of(listener)
        portal.call(ending.set)
        done.result(BOUND_SECONDS)

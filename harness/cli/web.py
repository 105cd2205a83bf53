"""`cellwright web`: starts a server of programs, sessions and tools over HTTP."""

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install
from ...runner.spawn import Spawned, interpreter
from ..servers.owned_sessions import OwnedSessions, SessionLimits
from ..servers.tokens import CLIENT, OPERATOR, WEB_VARIABLE
from ..text.progress import ProgressLine
from .http_options import (
    add_access,
    add_session_limits,
    check_session_limits,
    http_settings,
    log_to_stderr,
)
from .model_server import add_model_server, model_client
from .operations import add_operations, operations_of
from .options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_policy,
    add_skills,
    backend_of,
    backend_of_server,
    policy_of,
    skills_of,
)
from .packages import add_server_packages, packages_of_server
from .tool_files import register_marked

if TYPE_CHECKING:
    from ...policies.policy import Policy
    from ...runner.audit.log import AuditLog
    from ..dashboard.live import LiveTimeline
    from ..sandbox.sandbox import Sandbox
    from ..servers.http_server import App
    from ..servers.tokens import HttpSettings
    from ..servers.web.agents import AgentsByClient
    from ..servers.web.state import WebState
    from ..tools.registry import ToolRegistry

_ADDRESS = "127.0.0.1:8809"
_PACKAGES = ("anyio", "starlette", "uvicorn")


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_backend(parser)
    add_server_packages(parser)
    parser.add_argument(
        "--http", default=_ADDRESS, metavar="HOST:PORT",
        help="serve on this address, default %(default)s; port 0 takes a free port",
    )  # fmt: skip
    add_access(parser, WEB_VARIABLE, f"TOKEN, NAME TOKEN, or NAME TOKEN {OPERATOR}")
    parser.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="offer the functions that this Python file marks @tool; it runs on the host; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--registry", metavar="FILE", help="the file of created tools; default none"
    )
    parser.add_argument(
        "--runs", metavar="FILE",
        help="the file of durable runs; default none: they are lost when the server ends",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="URL",
        help="offer an agent with the model of this server, such as http://127.0.0.1:8080/v1",
    )  # fmt: skip
    add_model_server(parser)
    parser.add_argument(
        "--agents", metavar="DIR", type=Path,
        help="where the agents keep their tasks and tools; default none: they are lost when the server "
        "ends",
    )  # fmt: skip
    add_skills(parser, "offer")
    add_session_limits(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_operations(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    policy = policy_of(options)
    _require_packages()
    check_session_limits(options)
    backend_of_server(options)
    place = http_settings(options, "--http", options.http, WEB_VARIABLE, {OPERATOR})
    log_to_stderr()
    # its imports take as long as those of this process
    spawned = None if options.backend == "oci" else Spawned(interpreter())
    with contextlib.ExitStack() as stack:
        with ProgressLine("starting the server"):
            from ..dashboard.live import LiveTimeline
            from ..servers.operations.measurements import Measurements
            from ..servers.operations.observation import observing, serving_operators
            from ..servers.operations.requests_middleware import RequestsMiddleware
            from ..servers.web.app import web_app
            from ..servers.web.dashboard_endpoints import dashboard_pages
            from ..servers.web.lifecycle import run as serve

            settings, measurements = operations_of(options), Measurements([policy.name])
            timeline = LiveTimeline()
            seen = stack.enter_context(observing(settings, measurements, timeline.add))
            state = stack.enter_context(
                _state(options, policy, place, spawned, seen.trail, timeline)
            )
            measurements.add_gauges(lambda: state.services.gauges(measurements))
            stack.enter_context(serving_operators(settings, measurements))

        def watched(app: "App") -> "App":
            return RequestsMiddleware(app, "web", measurements, seen.log, CLIENT)

        pages, around = dashboard_pages(), [watched]
        serve(lambda: web_app(state, place.hosts, place.origins, pages=pages, around=around), place)
    return SUCCEEDED


def _require_packages() -> None:
    """Raise PolicyError if the extra is not installed."""
    if any(importlib.util.find_spec(each) is None for each in _PACKAGES):
        raise PolicyError("the extra `web` is not installed", how_to_install("web"))


@contextlib.contextmanager
def _state(
    options: argparse.Namespace, policy: "Policy", place: "HttpSettings", spawned: Spawned | None,
    audit: "AuditLog | None", timeline: "LiveTimeline",
) -> Iterator["WebState"]:  # fmt: skip
    """Open the cells, the tools and the runs behind the server, and close them after it."""
    from ..runs.durable_runs import Runs
    from ..sandbox.sandbox import Sandbox
    from ..servers.services import ServicesByClient
    from ..servers.web.run_endpoints import approver
    from ..servers.web.state import DashboardSources, WebLimits, WebState
    from ..tools.registry import ToolRegistry

    limits = WebLimits()
    of_sessions = SessionLimits(
        of_one=max(1, options.sessions * 3 // 4), of_all=options.sessions,
        idle_seconds=options.session_idle,
    )  # fmt: skip
    with (
        Sandbox(
            policy=policy,
            pool=0,
            audit=audit or False,
            spawned=spawned,
            pauses=of_sessions.pauses,
            **backend_of(options),
            **packages_of_server(options, policy),
        ) as ceiling,
        ToolRegistry(options.registry) as registry,
        Runs(options.runs) as runs,
    ):
        for file in options.tools:
            register_marked(registry, file)
        services = ServicesByClient(
            ceiling, registry, approver(runs), of_sessions, skills=skills_of(options),
            server="web", running=limits.executions_of_one,
        )  # fmt: skip
        with contextlib.closing(services), _agents(options, ceiling, registry) as agents:
            dashboard = DashboardSources(timeline, Path(options.audit) if options.audit else None)
            sessions = OwnedSessions(of_sessions)
            try:
                yield WebState(services, sessions, runs, place.tokens, limits, dashboard, agents)
            finally:
                sessions.discard_paused()  # no other server can resume them


@contextlib.contextmanager
def _agents(
    options: argparse.Namespace, ceiling: "Sandbox", registry: "ToolRegistry"
) -> "Iterator[AgentsByClient | None]":
    """Let each client have an agent, if --model names a model, and close them after it."""
    if not options.model:
        yield None
        return
    from ..agent.agent import Agent
    from ..servers.web.agents import AgentsByClient

    model = model_client(options)
    tools = [found for each in registry.list_tools() if (found := registry.developers(each.name))]

    def make(client: str) -> Agent:
        directory = options.agents and options.agents / client
        return Agent(
            model, sandbox=ceiling, tools=tools, directory=directory, maker=f"web {client}"
        )

    with AgentsByClient(make) as agents:
        yield agents

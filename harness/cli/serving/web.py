"""`cellwright web`: starts a server of programs, sessions and tools over HTTP."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ....policies.policy import Policy
from ....runner.audit.log import AuditLog
from ....runner.launching.spawn import Spawned, interpreter
from ...agent.agent import Agent
from ...dashboard.dashboard_page import LiveTimeline
from ...runs.durable_runs import Runs
from ...sandbox.sandbox import Sandbox
from ...servers.client_quota import CLIENT, OPERATOR, WEB_VARIABLE, HttpSettings
from ...servers.measurements import Measurements
from ...servers.request_log import RequestsMiddleware, observing, serving_operators
from ...servers.services import MadeByKey, OwnedSessions, ServicesByClient, SessionLimits
from ...text.terminal_text import ProgressLine
from ...tools.registry import ToolRegistry
from ..options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_image,
    add_operations,
    add_policy,
    add_skills,
    add_workers,
    backend_of_server,
    operations_of,
    policy_of,
    skills_of,
)
from ..package_options import add_server_packages
from .serving_options import (
    add_access,
    add_model_server,
    add_session_limits,
    add_tools,
    check_session_limits,
    http_settings,
    log_to_stderr,
    model_client,
    opened_cells,
    require_web,
)

if TYPE_CHECKING:  # these need the extra
    from ...servers.http_server import App
    from ...servers.web.endpoint import WebState

_ADDRESS = "127.0.0.1:8809"


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_backend(parser)
    add_workers(parser, "of each client")
    add_image(parser)
    add_server_packages(parser)
    parser.add_argument(
        "--http", default=_ADDRESS, metavar="HOST:PORT",
        help="serve on this address, default %(default)s; port 0 takes a free port",
    )  # fmt: skip
    add_access(parser, WEB_VARIABLE, f"TOKEN, NAME TOKEN, or NAME TOKEN {OPERATOR}")
    add_tools(parser)
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
    require_web()
    check_session_limits(options)
    backend_of_server(options)
    place = http_settings(options, "--http", options.http, WEB_VARIABLE, {OPERATOR})
    log_to_stderr()
    # its imports take as long as those of this process
    spawned = None if options.backend == "oci" or options.image else Spawned(interpreter())
    with contextlib.ExitStack() as stack:
        with ProgressLine("starting the server"):
            from ...servers.web.web_app import dashboard_pages, web_app
            from ...servers.web.web_app import run as serve

            settings, measurements = operations_of(options), Measurements([policy.name])
            timeline = LiveTimeline()
            seen = stack.enter_context(observing(settings, measurements, timeline.add))
            state = stack.enter_context(
                _state(options, policy, place, spawned, seen.trail, timeline)
            )
            measurements.add_gauges(lambda: state.services.gauges(measurements))
            probe = state.services.ceiling._probe
            stack.enter_context(serving_operators(settings, measurements, probe))

        def watched(app: "App") -> "App":
            return RequestsMiddleware(app, "web", measurements, seen.log, CLIENT)

        pages, around = dashboard_pages(), [watched]
        serve(lambda: web_app(state, place.hosts, place.origins, pages=pages, around=around), place)
    return SUCCEEDED


@contextlib.contextmanager
def _state(
    options: argparse.Namespace, policy: Policy, place: HttpSettings, spawned: Spawned | None,
    audit: AuditLog | None, timeline: LiveTimeline,
) -> Iterator["WebState"]:  # fmt: skip
    """Open the cells, the tools and the runs behind the server, and close them after it."""
    from ...servers.web.endpoint import DashboardSources, WebLimits, WebState
    from ...servers.web.tool_endpoints import approver

    limits = WebLimits()
    of_sessions = SessionLimits(
        of_one=max(1, options.sessions * 3 // 4), of_all=options.sessions,
        idle_seconds=options.session_idle,
    )  # fmt: skip
    with (
        opened_cells(options, policy, of_sessions, spawned, audit) as (ceiling, registry),
        Runs(options.runs) as runs,
    ):
        services = ServicesByClient(
            ceiling, registry, approver(runs), of_sessions, skills=skills_of(options),
            server="web", running=limits.executions_of_one, workers=options.workers,
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
    options: argparse.Namespace, ceiling: Sandbox, registry: ToolRegistry
) -> Iterator[MadeByKey[str, Agent] | None]:
    """Let each client have an agent, if --model names a model, and close them after it."""
    if not options.model:
        yield None
        return
    model = model_client(options)
    tools = [found for each in registry.list_tools() if (found := registry.developers(each.name))]

    def make(client: str) -> Agent:
        directory = options.agents and options.agents / client
        return Agent(
            model, sandbox=ceiling, tools=tools, directory=directory, maker=f"web {client}"
        )

    with MadeByKey(make) as agents:
        yield agents

"""`cellwright mcp`: starts an MCP server on standard input and output or over HTTP."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.policy import Policy
from ....runner.launching.spawn import Spawned, interpreter
from ...runs.durable_runs import Runs
from ...search.search import MODEL_HELP, commands_model
from ...servers.client_quota import CLIENT, MCP_VARIABLE, HttpSettings
from ...servers.mcp.stdio_streams import claim
from ...servers.measurements import Measurements
from ...servers.request_log import App, RequestsMiddleware, observing, serving_operators
from ...servers.services import OwnedSessions, ServicesByClient, SessionLimits
from ...text.terminal_text import ProgressLine
from ...tools.registry import ToolRegistry
from ...tools.results import RedactSecrets
from ..keeping.servers import add_configuration, opened, require_sdk
from ..options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_image,
    add_operations,
    add_policy,
    add_privacy,
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
    add_session_limits,
    add_tools,
    check_session_limits,
    http_settings,
    log_to_stderr,
    opened_cells,
)

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog

_ADDRESS = "127.0.0.1:8808"


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_backend(parser)
    add_workers(parser, "of each client")
    add_image(parser)
    add_server_packages(parser)
    parser.add_argument(
        "--http", nargs="?", const=_ADDRESS, metavar="HOST:PORT",
        help=f"serve over HTTP on this address, default {_ADDRESS}, instead of stdin and stdout",
    )  # fmt: skip
    add_access(parser, MCP_VARIABLE, "TOKEN or NAME TOKEN")
    add_tools(parser)
    add_skills(parser, "offer")
    parser.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    add_configuration(parser)
    parser.add_argument(
        "--redact",
        action="store_true",
        help="redact what looks like a secret in the results of tools",
    )
    add_privacy(parser)
    add_session_limits(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_operations(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until the client closes its end or until a signal."""
    policy = policy_of(options)
    require_sdk()
    check_session_limits(options)
    backend_of_server(options)
    limits = SessionLimits(of_all=options.sessions, idle_seconds=options.session_idle)
    place = _place_of(options) or claim()  # first, because a file of --tools may print
    log_to_stderr()
    # started early: its imports take as long as those of this process
    spawned = None if options.backend == "oci" or options.image else Spawned(interpreter())
    with contextlib.ExitStack() as stack:
        with ProgressLine("starting the server"):
            from ...servers.mcp.mcp_lifecycle import run as serve

            settings, measurements = operations_of(options), Measurements([policy.name])
            seen = stack.enter_context(observing(settings, measurements))
            services, runs = stack.enter_context(
                _services(options, policy, limits, spawned, seen.trail)
            )
            measurements.add_gauges(lambda: services.gauges(measurements))
            stack.enter_context(serving_operators(settings, measurements, services.ceiling._probe))

        def watched(app: App) -> App:
            return RequestsMiddleware(app, "mcp", measurements, seen.log, CLIENT)

        serve(
            services, OwnedSessions(limits), runs, place,
            open_world=_is_open(options, policy), around=watched,
        )  # fmt: skip
    return SUCCEEDED


def _is_open(options: argparse.Namespace, policy: Policy) -> bool:
    """Tell whether programs can reach other hosts."""
    return bool(options.servers or policy.http.allow or policy.network.allow)


@contextlib.contextmanager
def _services(
    options: argparse.Namespace, policy: Policy, limits: SessionLimits, spawned: Spawned | None,
    audit: "AuditLog | None",
) -> Iterator[tuple[ServicesByClient, Runs]]:  # fmt: skip
    """Open the cells, the tools and the runs behind the server, and close them after it."""
    from ...servers.mcp.approvals import approver

    with (
        opened_cells(options, policy, limits, spawned, audit, commands_model(options.model)) as (
            ceiling,
            registry,
        ),
        Runs() as runs,
    ):
        if policy.http.allow:
            from ...tools.http.http_tool import http_tools

            registry.register(*http_tools(policy.http))
        filters = (RedactSecrets(),) if options.redact else ()
        services = ServicesByClient(
            ceiling, registry, approver(runs), limits, filters, skills_of(options),
            workers=options.workers,
        )  # fmt: skip
        with _upstream(options, registry), contextlib.closing(services):
            yield services, runs


def _upstream(
    options: argparse.Namespace, registry: ToolRegistry
) -> contextlib.AbstractContextManager[object]:
    """Offer the tools of the servers that --servers names, if any."""
    return opened(options, registry) if options.servers else contextlib.nullcontext()


def _place_of(options: argparse.Namespace) -> HttpSettings | None:
    """Return the address, the tokens and the allowed origins; None for stdin and stdout.

    Raises PolicyError.
    """
    if options.http is None:
        _refuse_without_http(options)
        return None
    return http_settings(options, "--http", options.http, MCP_VARIABLE)


def _refuse_without_http(options: argparse.Namespace) -> None:
    for name in ("token_file", "remote", "origin", "request_log"):
        if getattr(options, name):
            raise PolicyError(f"--{name.replace('_', '-')}: requires --http")

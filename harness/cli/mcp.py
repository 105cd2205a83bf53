"""`cellwright mcp`: starts an MCP server on standard input and output or over HTTP."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.spawn import Spawned, interpreter
from ..runs.durable_runs import Runs
from ..sandbox.sandbox import Sandbox
from ..search.model import MODEL_HELP, commands_model
from ..servers.mcp.streams import claim
from ..servers.operations.measurements import Measurements
from ..servers.operations.observation import observing, serving_operators
from ..servers.operations.requests_middleware import App, RequestsMiddleware
from ..servers.owned_sessions import OwnedSessions, SessionLimits
from ..servers.services import ServicesByClient
from ..servers.tokens import CLIENT, MCP_VARIABLE, HttpSettings
from ..text.progress import ProgressLine
from ..tools.filters import RedactSecrets
from ..tools.registry import ToolRegistry
from .http_options import (
    add_access,
    add_session_limits,
    check_session_limits,
    http_settings,
    log_to_stderr,
)
from .operations import add_operations, operations_of
from .options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_policy,
    add_privacy,
    add_skills,
    backend_of,
    backend_of_server,
    policy_of,
    skills_of,
)
from .packages import add_server_packages, packages_of_server
from .servers import add_configuration, opened, require_sdk
from .tool_files import register_marked

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog

_ADDRESS = "127.0.0.1:8808"


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_backend(parser)
    add_server_packages(parser)
    parser.add_argument(
        "--http", nargs="?", const=_ADDRESS, metavar="HOST:PORT",
        help=f"serve over HTTP on this address, default {_ADDRESS}, instead of stdin and stdout",
    )  # fmt: skip
    add_access(parser, MCP_VARIABLE, "TOKEN or NAME TOKEN")
    parser.add_argument(
        "--registry",
        metavar="FILE",
        help="the file of created tools; default none: they are lost when the server ends",
    )
    parser.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="offer the functions that this Python file marks @tool; it runs on the host; may be "
        "repeated",
    )  # fmt: skip
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
    spawned = None if options.backend == "oci" else Spawned(interpreter())
    with contextlib.ExitStack() as stack:
        with ProgressLine("starting the server"):
            from ..servers.mcp.instructions import usable_languages
            from ..servers.mcp.lifecycle import run as serve

            settings, measurements = operations_of(options), Measurements([policy.name])
            seen = stack.enter_context(observing(settings, measurements))
            services, runs = stack.enter_context(
                _services(options, policy, limits, spawned, seen.trail)
            )
            measurements.add_gauges(lambda: services.gauges(measurements))
            stack.enter_context(serving_operators(settings, measurements))

        def watched(app: App) -> App:
            return RequestsMiddleware(app, "mcp", measurements, seen.log, CLIENT)

        executable = None if options.backend == "oci" else interpreter()
        serve(
            services, OwnedSessions(limits), runs, place,
            open_world=_is_open(options, policy), around=watched,
            languages=usable_languages(executable),
        )  # fmt: skip
    return SUCCEEDED


def _is_open(options: argparse.Namespace, policy: Policy) -> bool:
    """Tell whether programs can reach what is outside of this host."""
    return bool(options.servers or policy.http.allow or policy.network.allow)


@contextlib.contextmanager
def _services(
    options: argparse.Namespace, policy: Policy, limits: SessionLimits, spawned: Spawned | None,
    audit: "AuditLog | None",
) -> Iterator[tuple[ServicesByClient, Runs]]:  # fmt: skip
    """Open the cells, the tools and the runs behind the server, and close them after it."""
    from ..servers.mcp.approvals import approver

    with (
        Sandbox(
            policy=policy,
            pool=0,
            audit=audit or False,
            spawned=spawned,
            pauses=limits.pauses,
            **backend_of(options),
            **packages_of_server(options, policy),
        ) as ceiling,
        ToolRegistry(options.registry, model=commands_model(options.model)) as registry,
        Runs() as runs,
    ):
        for file in options.tools:
            register_marked(registry, file)
        if policy.http.allow:
            from ..tools.http.tool import http_tools

            registry.register(*http_tools(policy.http))
        filters = (RedactSecrets(),) if options.redact else ()
        services = ServicesByClient(
            ceiling, registry, approver(runs), limits, filters, skills_of(options)
        )
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

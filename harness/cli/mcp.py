"""`cellwright mcp`: its arguments, and the server from start to end."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator

from ...policies.errors import PolicyError
from ...policies.policy import Policy, check_limit
from ...runner.spawn import Spawned, interpreter
from ..runs.durable_runs import Runs
from ..sandbox.sandbox import Sandbox
from ..search.model import MODEL_HELP, commands_model
from ..servers.mcp.place import HttpSettings
from ..servers.mcp.services import ServicesByClient
from ..servers.mcp.sessions import OwnedSessions, SessionLimits
from ..servers.mcp.streams import claim
from ..servers.mcp.tokens import tokens_of
from ..text.terminal import harmless
from ..tools.filters import RedactSecrets
from ..tools.registry import ToolRegistry
from .marked_files import register_marked
from .options import RAN, audit_of
from .servers import add_file, opened, require_sdk

_PLACE = "127.0.0.1:8808"
_HERE = ("127.0.0.1", "::1", "localhost")
_LAST_PORT = 65_535


def add_mcp(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cellwright mcp` but for policies."""
    parser.add_argument(
        "--http", nargs="?", const=_PLACE, metavar="HOST:PORT",
        help=f"serve over HTTP there, {_PLACE} unless told, instead of stdin and stdout",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", metavar="FILE",
        help="a line for each client over HTTP, TOKEN or NAME TOKEN; else one of "
        "CELLWRIGHT_MCP_TOKEN, else a new one, which is told on stderr",
    )  # fmt: skip
    parser.add_argument(
        "--remote", action="append", default=[], metavar="NAME",
        help="listen elsewhere than on the loopback too, where clients call this host NAME",
    )  # fmt: skip
    parser.add_argument(
        "--origin", action="append", default=[], metavar="URL",
        help="a web page from there may connect; none may unless told",
    )  # fmt: skip
    parser.add_argument(
        "--registry", metavar="FILE", help="where made tools are kept; else until the server ends"
    )
    parser.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="Python of yours, which runs on the host: its functions marked @tool are offered",
    )  # fmt: skip
    parser.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    add_file(parser)
    parser.add_argument(
        "--redact", action="store_true", help="take what looks like a secret out of tools' results"
    )
    usual = SessionLimits()
    parser.add_argument(
        "--sessions", type=int, default=usual.of_all, metavar="N", help="that are open at once"
    )
    parser.add_argument(
        "--session-idle", type=float, default=usual.idle_seconds, metavar="S",
        help="how long one may be idle",
    )  # fmt: skip
    parser.add_argument("--audit", metavar="FILE", help="append what happens to this trail")


def serve(options: argparse.Namespace, policy: Policy) -> int:
    """Serve until the client closes its end, or a signal; raises PolicyError."""
    require_sdk()
    check_limit("--sessions", options.sessions, whole=True)
    check_limit("--session-idle", options.session_idle)
    limits = SessionLimits(of_all=options.sessions, idle_seconds=options.session_idle)
    place = _place_of(options) or claim()  # before any file of --tools runs: it may print
    _log_to_stderr()
    spawned = Spawned(interpreter())  # a launcher imports as long as we do: let it begin
    from ..servers.mcp.lifecycle import run

    with _services(options, policy, limits, spawned) as (services, runs):
        run(services, OwnedSessions(limits), runs, place, open_world=bool(options.servers))
    return RAN


@contextlib.contextmanager
def _services(
    options: argparse.Namespace, policy: Policy, limits: SessionLimits, spawned: Spawned
) -> Iterator[tuple[ServicesByClient, Runs]]:
    """Give what stands behind the server, and end it after."""
    from ..servers.mcp.approvals import approver

    with (
        audit_of(options) as audit,
        Sandbox(policy=policy, pool=0, audit=audit or False, spawned=spawned) as ceiling,
        ToolRegistry(options.registry, model=commands_model(options.model)) as registry,
        Runs() as runs,
    ):
        for file in options.tools:
            register_marked(registry, file)
        filters = (RedactSecrets(),) if options.redact else ()
        services = ServicesByClient(ceiling, registry, approver(runs), limits, filters)
        with _upstream(options, registry), contextlib.closing(services):
            yield services, runs


def _upstream(
    options: argparse.Namespace, registry: ToolRegistry
) -> contextlib.AbstractContextManager[object]:
    """Offer the tools of other servers, if any are named."""
    return opened(options, registry) if options.servers else contextlib.nullcontext()


def _place_of(options: argparse.Namespace) -> HttpSettings | None:
    """Return where to listen, and who may come; None for stdin and stdout.  Raises PolicyError."""
    if options.http is None:
        _refuse_without_http(options)
        return None
    host, _, port = options.http.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        raise PolicyError(f"--http: {options.http!r} is not HOST:PORT")
    if host not in _HERE and not options.remote:
        raise PolicyError(
            f"--http: {host} is not the loopback: others could connect",
            "say --remote NAME, the name by which they call this host",
        )
    tokens, made = tokens_of(options.token_file)
    here = ["127.0.0.1", "localhost", "[::1]"] if host in _HERE else []
    return HttpSettings(
        host, int(port), tokens, made, (*here, *options.remote), tuple(options.origin)
    )


def _refuse_without_http(options: argparse.Namespace) -> None:
    for name in ("token_file", "remote", "origin"):
        if getattr(options, name):
            raise PolicyError(f"--{name.replace('_', '-')}: only with --http")


class _Harmless(logging.Formatter):
    """Writes out what would move a cursor: some of it is what clients sent."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Harmless("cellwright: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])

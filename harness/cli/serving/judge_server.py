"""`cellwright judge`: starts a server that judges programs, for evaluation and training."""

import argparse
import os
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....runner.settings import PoolSettings
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ...servers.client_quota import CLIENT
from ...servers.measurements import Measurements
from ...servers.request_log import RequestsMiddleware, observing, serving_operators
from ..options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_operations,
    add_policy,
    add_workers,
    backend_of,
    operations_of,
    policy_of,
)
from .serving_options import (
    add_access,
    http_settings,
    log_to_stderr,
    require_web,
)

if TYPE_CHECKING:  # these need the extra
    from ...servers.http_server import App

_ADDRESS = "127.0.0.1:8810"
_VARIABLE = "CELLWRIGHT_JUDGE_TOKEN"
_LOOPBACK = ("127.", "[::1]", "localhost")


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_backend(parser)
    add_workers(parser)
    parser.add_argument(
        "--http", default=_ADDRESS, metavar="HOST:PORT",
        help="serve on this address, default %(default)s; port 0 takes a free port",
    )  # fmt: skip
    add_access(parser, _VARIABLE, "TOKEN, or NAME TOKEN")
    parser.add_argument(
        "--no-token", action="store_true",
        help="let every process of this host in; only on a loopback address",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=int, metavar="N",
        help="requests that run at once; default one a processor, and two; others wait",
    )  # fmt: skip
    parser.add_argument(
        "--languages", metavar="FILE", help="a TOML file of further languages; default none"
    )
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_operations(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    from ...sandbox.calls.background import width_of

    policy = policy_of(options)
    require_web()
    if options.no_token and (not options.http.startswith(_LOOPBACK) or options.remote):
        raise PolicyError("--no-token: needs a loopback address, and no --remote")
    at_once = width_of(options.at_once)
    token = os.urandom(32).hex()
    place = http_settings(options, "--http", options.http, _VARIABLE, make_token=lambda: token)
    if options.no_token and not place.made:
        raise PolicyError("--no-token: cannot be combined with tokens")
    log_to_stderr()
    from ...servers.judge.judge_app import run as serve
    from ...servers.judge.judging_core import JudgingCore

    settings, measurements = operations_of(options), Measurements([policy.name])
    with (
        observing(settings, measurements) as seen,
        Sandbox(
            policy=policy,
            pool=PoolSettings(running=max(PoolSettings().running, 2 * at_once)),
            audit=seen.trail or False,
            workers=options.workers,
            host=HostSettings(languages=options.languages, **backend_of(options)),
        ) as sandbox,
    ):
        core = JudgingCore(sandbox, at_once, measurements)

        def watched(app: "App") -> "App":
            return RequestsMiddleware(app, "judge", measurements, seen.log, CLIENT)

        with serving_operators(settings, measurements, sandbox._probe):
            serve(core, place, token if options.no_token else "", watched)
    return SUCCEEDED

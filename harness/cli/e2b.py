"""`cellwright e2b`: starts a server with the interface of E2B, whose sandboxes are cells."""

import argparse
import importlib.util
import secrets
from typing import Any

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install
from ...policies.policy import Policy, check_limit
from .http_options import add_access, http_settings, log_to_stderr
from .options import AUDIT_HELP, SUCCEEDED, add_policy, audit_of, policy_of
from .packages import add_packages, packages_of, with_environment

_ADDRESS = "127.0.0.1:3000"
_PROFILE = "workshop"
_VARIABLE = "E2B_API_KEY"
_PACKAGES = ("anyio", "starlette", "uvicorn")


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser, default=_PROFILE)
    parser.set_defaults(policy=_PROFILE)
    parser.add_argument(
        "--http", default=_ADDRESS, metavar="HOST:PORT",
        help="serve on this address, default %(default)s; port 0 takes a free port",
    )  # fmt: skip
    add_access(parser, _VARIABLE, "KEY, or NAME KEY")
    parser.add_argument(
        "--sandboxes", type=int, default=32, metavar="N",
        help="sandboxes at most, of which one client has half; default %(default)s",
    )  # fmt: skip
    add_packages(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    policy = with_environment(policy_of(options), options)
    _check(policy)
    check_limit("--sandboxes", options.sandboxes, whole=True)
    if any(importlib.util.find_spec(each) is None for each in _PACKAGES):
        raise PolicyError("the extra `web` is not installed", how_to_install("web"))
    place = http_settings(options, "--http", options.http, _VARIABLE, make_token=_make_key)
    log_to_stderr()
    from ...runner.settings import SessionSettings
    from ..sandbox.sandbox import Sandbox
    from ..servers.e2b.lifecycle import run as serve
    from ..servers.e2b.messages import MOST_SECONDS
    from ..servers.e2b.sandboxes import E2bLimits

    forever = 3.0 * MOST_SECONDS  # the server ends each sandbox
    settings = SessionSettings(1, 2 * forever, forever, forever)
    with audit_of(options) as audit:

        def open_sandbox(narrowed: Policy) -> Sandbox:
            given: dict[str, Any] = packages_of(options)
            return Sandbox(
                policy=narrowed, pool=0, sessions=settings, audit=audit or False, python=options.python,
                **given,
            )  # fmt: skip

        limits = E2bLimits(max(1, options.sandboxes // 2), options.sandboxes)
        serve(policy, open_sandbox, place, limits)
    return SUCCEEDED


def _make_key() -> str:
    """Return a new key in the form that E2B's clients check."""
    return f"e2b_{secrets.token_hex(20)}"


def _check(policy: Policy) -> None:
    """Raise PolicyError for a policy whose cells cannot be sandboxes of E2B."""
    if not (policy.processes.subprocesses and policy.network.loopback):
        raise PolicyError(
            f"--policy: {policy.name} lacks subprocesses or loopback, which commands and files need",
            "use workshop, or a policy that extends it",
        )

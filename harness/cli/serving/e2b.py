"""`cellwright e2b`: starts a server with the interface of E2B, whose sandboxes are cells."""

import argparse
import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.policy import Policy, check_limit
from ..options import (
    AUDIT_HELP,
    SUCCEEDED,
    add_health,
    add_image,
    add_policy,
    audit_of,
    image_of,
    policy_of,
)
from ..package_options import add_packages, packages_of, with_environment
from .serving_options import add_access, http_settings, log_to_stderr, require_web

if TYPE_CHECKING:
    from ...sandbox.sandbox import Sandbox

_ADDRESS = "127.0.0.1:3000"
_PROFILE = "workshop"
_VARIABLE = "E2B_API_KEY"


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
    add_image(parser)
    add_packages(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_health(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    policy = with_environment(policy_of(options), options)
    _check(policy)
    check_limit("--sandboxes", options.sandboxes, whole=True)
    require_web()
    place = http_settings(options, "--http", options.http, _VARIABLE, make_token=_make_key)
    log_to_stderr()
    from ....runner.settings import SessionSettings
    from ...sandbox.sandbox import Sandbox
    from ...sandbox.sandbox_arguments import HostSettings
    from ...servers.e2b.control_messages import MOST_SECONDS
    from ...servers.e2b.e2b_app import run as serve
    from ...servers.e2b.e2b_sandboxes import E2bLimits

    forever = 3.0 * MOST_SECONDS  # the server ends each sandbox
    settings = SessionSettings(1, 2 * forever, forever, forever)
    with audit_of(options) as audit:

        def open_sandbox(narrowed: Policy) -> Sandbox:
            packages, store = packages_of(options)
            return Sandbox(
                policy=narrowed, pool=0, sessions=settings, audit=audit or False, packages=packages,
                host=HostSettings(python=options.python, package_store=store),
                **image_of(options),
            )  # fmt: skip

        limits = E2bLimits(max(1, options.sandboxes // 2), options.sandboxes)
        with _serving_health(options.health, lambda: open_sandbox(policy)):
            serve(policy, open_sandbox, place, limits)
    return SUCCEEDED


@contextlib.contextmanager
def _serving_health(address: str | None, open_sandbox: Callable[[], "Sandbox"]) -> Iterator[None]:
    """Answer at the address of --health; the cell that is tried is of a sandbox of its own, which the
    first request makes."""
    from ...servers.measurements import Measurements
    from ...servers.request_log import OperatorSettings, serving_operators
    from ...servers.services import MadeByKey

    def make(_: str) -> "Sandbox":
        return open_sandbox()

    with MadeByKey(make) as tried:
        settings = OperatorSettings(health=address)
        with serving_operators(settings, Measurements(), lambda: tried.of("")._probe()):
            yield


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

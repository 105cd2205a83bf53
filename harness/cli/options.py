"""What commands have in common: exit statuses, and the options that say what a cell may do."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.policy import OPTIONAL_LAYERS, Policy, named_layers

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog

# Those that are shipped; a test compares, since to list the folder takes time at every start.
PROFILES = ("server", "standard", "strict", "tool", "trusted-read")
RAN, GUEST_FAILED, USAGE, OURS = 0, 1, 2, 70


def add_policy(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    once = f"a TOML file, or a profile: {', '.join(PROFILES)}; default strict"
    if several:
        more = f"{once}; may be repeated: clients choose by name, and get the first by default"
        parser.add_argument("--policy", action="append", metavar="P", help=more)
    else:
        parser.add_argument("--policy", metavar="P", help=once)
    layers = ", ".join(OPTIONAL_LAYERS)
    optional = (
        f"go on without this layer where the host lacks it: {layers}, or cgroup for the last three"
    )
    parser.add_argument("--optional", action="append", default=[], metavar="LAYER", help=optional)


def policy_of(options: argparse.Namespace) -> Policy:
    return policy_named(options.policy, options)


def policy_named(name: str | None, options: argparse.Namespace) -> Policy:
    policy = Policy(name="strict")
    if name:
        from ...policies.loading import load_policy

        policy = load_policy(name)
    chosen = named_layers("--optional", options.optional)
    return msgspec.structs.replace(policy, optional_layers=(*policy.optional_layers, *chosen))


@contextlib.contextmanager
def audit_of(options: argparse.Namespace) -> Iterator["AuditLog | None"]:
    """Open the trail that was asked for; without one nothing of it is imported.

    It is in its file alone: nobody could ask a command for what it remembers, up to 20 MiB in a daemon.
    """
    if options.audit is None:
        yield None
        return
    from ...runner.audit.log import AuditLog

    with AuditLog(path=options.audit, max_entries=0) as log:
        yield log

"""`cellwright explain`: prints what a policy enforces on this host, or how two policies differ."""

import argparse

from ...policies.errors import PolicyError
from ...policies.explain import explain
from ...policies.loading import load_policy
from ...policies.narrowing import exceeds
from ...policies.policy import Filesystem, Policy
from ...runner.host.paths import is_open_to_cells
from ...runner.listing import list_system_calls
from ..sandbox.sandbox import Sandbox
from ..text.progress import ProgressLine
from .options import SUCCEEDED, add_json, add_policy, policy_of, print_json
from .sandbox import add_connect


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_connect(parser)
    parser.add_argument(
        "--diff", metavar="P", help="print only what this policy allows more (+) or less (-)"
    )
    parser.add_argument(
        "--system-calls",
        action="store_true",
        help="list the system calls that confine a cell instead",
    )
    add_json(parser, "value")


def run(options: argparse.Namespace) -> int:
    if options.connect is not None and (options.diff or options.system_calls):
        raise PolicyError("--connect: cannot be combined with --diff or --system-calls")
    if options.diff:
        return _diff(policy_of(options), options)
    if options.system_calls:
        return _list_system_calls(policy_of(options), options)
    with ProgressLine("starting a launcher"), _sandbox(options) as sandbox:
        lines = explain(sandbox.plan, sandbox.policy)
        if options.connect is None:
            lines += _closed_paths(sandbox.policy.filesystem)
    if options.json:
        print_json(lines)
    else:
        print("\n".join(lines))
    return SUCCEEDED


def _sandbox(options: argparse.Namespace) -> Sandbox:
    """Return a sandbox of the policy, or with --connect one of a daemon."""
    if options.connect is None:
        return Sandbox(policy=policy_of(options), pool=0)
    if options.optional:
        raise PolicyError(
            "--optional cannot be combined with --connect: the daemon decides it",
            "give --optional to cellwright serve",
        )
    return Sandbox(connect=options.connect, policy=options.policy)


def _closed_paths(files: Filesystem) -> list[str]:
    """Return a line for each path that the policy shows in vain, for its mode on this host."""
    wanted = [(path, "read", False) for path in files.read if path not in files.write]
    wanted += [(path, "write", True) for path in files.write]
    return [
        f"CLOSED {path}: programs cannot {verb} it, because its mode keeps out the id of cells"
        for path, verb, for_writing in wanted
        if not is_open_to_cells(path, for_writing=for_writing)
    ]


def _list_system_calls(policy: Policy, options: argparse.Namespace) -> int:
    calls = list_system_calls(policy)
    if options.json:
        print_json(calls)
    else:
        for layer, lines in calls.items():
            print(layer, *(f"  {line}" for line in lines), sep="\n")
    return SUCCEEDED


def _diff(policy: Policy, options: argparse.Namespace) -> int:
    other = load_policy(options.diff)
    more, less = exceeds(other, policy), exceeds(policy, other)
    if options.json:
        print_json({"more": more, "less": less})
    else:
        print(*(f"+ {line}" for line in more), *(f"- {line}" for line in less), sep="\n")
    return SUCCEEDED

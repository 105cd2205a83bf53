"""`cellwright explain`: prints what a policy enforces on this host, or how two policies differ."""

import argparse
from itertools import groupby

from ....policies.advice.explanation import explain
from ....policies.errors import LaunchError, PolicyError
from ....policies.narrowing import exceeds
from ....policies.policy import Filesystem, Policy
from ....policies.profiles.loading import load_policy
from ....runner import channel
from ....runner.host.shown_paths import is_open_to_cells
from ....runner.launching.generation import Generation
from ....runner.launching.launch import LaunchArguments
from ....runner.launching.spawn import Spawned, interpreter
from ....runner.messages import Listed, decode
from ...sandbox.sandbox import Sandbox
from ...text.terminal_text import ProgressLine
from ..options import SUCCEEDED, add_gpu, add_json, add_policy, policy_of, print_json
from ..running.sandbox_options import add_connect


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_gpu(parser)
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
    if options.gpu:
        raise PolicyError(
            "--gpu cannot be combined with --connect: the daemon's policies decide it"
        )
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


_MOST_BYTES = 4 * 1024 * 1024


def list_system_calls(policy: Policy) -> dict[str, list[str]]:
    """Return the system calls that a guest's process makes before its program, by layer and in order.

    Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError.
    """
    spawned = Spawned(interpreter(), "cellwright.runner.launcher.main:list_calls")
    generation = Generation(spawned, LaunchArguments(policy, spawned.sources_of(policy)))
    try:
        frame = channel.Receiver(generation.launcher.socket, _MOST_BYTES).receive_whole()
        if not frame:
            raise LaunchError("the launcher ended before it told its system calls")
        listed: Listed = decode(frame, Listed)
    finally:
        generation.close()
    calls: dict[str, list[str]] = {}
    for layer, step in listed.steps:
        calls.setdefault(layer, []).append(step)
    return {layer: _counted(words) for layer, words in calls.items()}


def _counted(words: list[str]) -> list[str]:
    """Return each line once for all that follow one another."""
    runs = ((line, len(list(same))) for line, same in groupby(words))
    return [f"{line} ({count} times)" if count > 1 else line for line, count in runs]

"""The arguments of `cellwright exec`, as the daemon reads them for an open cell."""

import argparse
import os
from collections.abc import Mapping, Sequence

from msgspec import msgpack
from msgspec.structs import replace

from ...policies.errors import PolicyError
from ..sandbox.projects.project_policy import policy_of_project
from ..servers.daemon.open_cells import PreparedCommand
from .options import PROFILES
from .running.exec import base_of, command_of, project_of, project_options

# What an open cell knows; other options need a cell of their own.
_OF_OPEN_CELLS = frozenset([
    "project", "shell", "allow", "allow_registries", "host_port", "env", "read", "write", "protect",
    "unprotect", "memory", "policy", "optional", "arguments", "keep", "close", "connect",
])  # fmt: skip
_OF_EACH_COMMAND = frozenset(["project", "shell", "arguments", "keep", "close", "connect"])


def prepare(arguments: Sequence[str], cwd: str, environment: Mapping[str, str]) -> PreparedCommand:
    """Return what the arguments of this command mean for a client in `cwd`; raises PolicyError."""
    from .commands import parser_of  # it imports all commands by name

    try:
        options = parser_of("exec").parse_args(["exec", *arguments])
        others = vars(parser_of("exec").parse_args(["exec", "--"]))
    except SystemExit:  # the client says it
        raise PolicyError("exec: invalid arguments") from None
    own = [
        name for name, value in vars(options).items()
        if name not in _OF_OPEN_CELLS and value != others[name]
    ]  # fmt: skip
    why = f"--{own[0].replace('_', '-')} cannot be combined with an open cell" if own else ""

    def place(path: str) -> str:
        return os.path.join(cwd, os.path.expanduser(path))

    is_whole = options.project is not None
    options.project = place(options.project or ".")
    project = project_of(options, whole=is_whole)
    options.read, options.write = [*map(place, options.read)], [*map(place, options.write)]
    if options.policy not in PROFILES:
        options.policy = place(options.policy)
    command = ["true"] if options.close else command_of(options)
    name, wanted = command[0], project_options(options)
    found = [place(name) if "/" in name else name, *command[1:]]
    base = base_of(options)
    shown = policy_of_project(base, project, found, replace(wanted, review=False), environment)
    policy = shown.policy
    key = (
        project.root, project.git, base, wanted, shown.agent, options.protect, options.unprotect,
        policy.filesystem.write, policy.processes.execute, policy.network,
    )  # fmt: skip
    told = _named_options(options, others)
    if shown.agent:
        told = f"{told} -- {shown.agent}".strip()
    return PreparedCommand(
        shown, command, msgpack.encode(key, order="sorted"), told,
        keep=options.keep, close=options.close, why=why,
    )  # fmt: skip


def _named_options(options: argparse.Namespace, others: dict[str, object]) -> str:
    """Return the options that decide what an open cell is."""
    names = sorted(_OF_OPEN_CELLS - _OF_EACH_COMMAND)
    values = {
        name: getattr(options, name) for name in names if getattr(options, name) != others[name]
    }
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in values.items()
    }
    return " ".join(f"--{name.replace('_', '-')} {text}" for name, text in texts.items())

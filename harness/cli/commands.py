"""The table of commands, and the parser that is built from it.

Each command is one module with `add(parser)`, which adds its arguments, and `run(options) -> int`,
which runs it and returns the exit status.  A command imports only its own module: others import
packages that it does not need, or that are not installed.
"""

import argparse
import contextlib
import gc
import sys
import warnings
from collections.abc import Sequence, Set

from ..version import NAME, version_line
from .options import SUCCEEDED
from .parsing import Parser

TYPE_CHECKING = False  # `--version` does not need `typing`
if TYPE_CHECKING:
    from typing import Any, Protocol

    from ...runner.spawn import Spawned

    class CommandModule(Protocol):
        """The module of a command."""

        def add(self, parser: argparse.ArgumentParser, /) -> None:
            """Add the arguments of the command, and its subcommands."""

        def run(self, options: argparse.Namespace, /) -> int:
            """Run the command and return the exit status; raises CellwrightError and OSError."""


# Of objects between two collections: what is imported until a cell is ready stays, too.
_THRESHOLD = 10_000
# name: module of this package, summary
COMMANDS = {
    "run": ("run", "run a program in a fresh cell"),
    "repl": ("repl", "type programs into a session"),
    "shell": ("shell", "open a shell at a terminal in a cell"),
    "explain": ("explain", "show what a policy enforces on this host"),
    "learn": ("learn", "run a program and write the policy it needs"),
    "doctor": ("doctor", "test every layer and print how to repair those that fail"),
    "env": ("env", "lock, build, list and remove sets of packages"),
    "workspace": ("workspace", "list, read and change named workspaces, and commit their changes"),
    "audit": ("audit", "read an audit trail and verify it"),
    "runs": ("runs", "list durable runs, decide on approvals, and resume"),
    "tools": ("tools", "create, call and list tools"),
    "skills": ("skills", "list, check, trust, keep and copy skills"),
    "agent": ("agent", "give a task to a model that writes programs and tools"),
    "servers": ("servers", "list MCP servers, and call and pin their tools"),
    "serve": ("serve", "start a daemon that shares one pool of cells among processes"),
    "mcp": ("mcp", "start an MCP server that offers cells and tools to a model"),
    "web": ("web", "start an HTTP server of programs, sessions, tools and runs"),
    "e2b": ("e2b", "start a server with the interface of E2B, whose sandboxes are cells"),
    "jupyter": ("jupyter", "install a kernel for notebooks, whose programs run in cells"),
    "network": ("network", "list refused names of running sandboxes, and allow or deny hosts"),
    "privacy": ("privacy", "find personal data in files"),
    "status": ("status", "show what a daemon does now"),
    "ps": ("ps", "list the sandboxes and sessions of this user that live"),
    "kill": ("kill", "end sandboxes and sessions of this user"),
    "gc": ("collect", "remove what killed processes of this user left"),
    "bench": ("bench", "measure the cost of cells on this machine"),
    "help": ("help", "show the arguments of a command"),
    "completion": ("completion", "print a completion script for a shell"),
    "man": ("man", "print the manual page"),
}


def run_command(arguments: Sequence[str], spawned: "Spawned | None") -> int:
    """Run one command and return its exit status; `spawned` is a launcher started ahead for it."""
    if not arguments:
        parser_of().print_help()
        return SUCCEEDED
    options = parser_of(arguments[0]).parse_args(arguments)
    if not gc.isenabled():  # main.py: this is the command of the process
        gc.freeze()  # or each collection, and the end of the interpreter, would look at what stays
        gc.enable()
        warnings.showwarning = _show_warning  # type: ignore[assignment]  # it passes all on
    if spawned:
        gc.set_threshold(_THRESHOLD)
    options.spawned = spawned
    return int(options.command(options))


def _show_warning(*given: "Any") -> None:
    from .warning_lines import show_warning  # seldom needed

    show_warning(*given)


def parser_of(command: str = "") -> Parser:
    """Return a parser for `command`; without one, or for an unknown one, a parser that knows the name
    and summary of each, but no arguments."""
    if (
        command in COMMANDS
    ):  # only this one: the parsers of all take as long as the arguments of one
        return _parser({command}, {command})
    return _parser(COMMANDS.keys(), set())


def complete_parser() -> Parser:
    """Return a parser that knows the arguments of every command whose packages are installed."""
    return _parser(COMMANDS.keys(), COMMANDS.keys(), skip_missing=True)


def _parser(names: Set[str], with_arguments: Set[str], *, skip_missing: bool = False) -> Parser:
    parser = Parser(
        prog=NAME,
        description="Run untrusted programs, each in its own kernel-isolated cell.",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        if name not in names:
            continue
        below = commands.add_parser(name, help=summary, description=summary)
        if name in with_arguments:
            with contextlib.suppress(*((ImportError,) if skip_missing else ())):
                command = _imported(module)
                command.add(below)
                below.set_defaults(command=command.run)
    return parser


def _imported(module: str) -> "CommandModule":
    name = f"{__package__}.{module}"
    __import__(name)
    return sys.modules[name]


class _Version(argparse.Action):
    """Reads the version only for `--version`: reading it takes as long as a call."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: "Any") -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_line())
        parser.exit(SUCCEEDED)

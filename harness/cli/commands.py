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

    from ...runner.launching.spawn import Spawned

    class CommandModule(Protocol):
        """The module of a command."""

        def add(self, parser: argparse.ArgumentParser, /) -> None:
            """Add the arguments of the command, and its subcommands."""

        def run(self, options: argparse.Namespace, /) -> int:
            """Run the command and return the exit status; raises CellwrightError and OSError."""


# New objects between two garbage collections. Objects imported until a cell is ready live on anyway.
_THRESHOLD = 10_000
# command -> module of this package, summary
COMMANDS = {
    "run": ("running.run", "run a program in a fresh cell"),
    "exec": ("running.exec", "run a command, such as a coding agent, on the project around it"),
    "changes": (
        "keeping.changes",
        "show, apply or discard what a command would change in a project that it ran on with --review",
    ),
    "batch": ("running.batch", "run or judge the programs of a file, and go on where it stopped"),
    "repl": ("running.repl", "type programs into a session"),
    "shell": ("running.shell", "open a shell at a terminal in a cell"),
    "explain": ("helping.explain", "show what a policy enforces on this host"),
    "languages": ("helping.languages", "list the languages that this host can run"),
    "learn": ("running.learn", "run a program and write the policy it needs"),
    "doctor": ("helping.doctor", "test every layer and print how to repair those that fail"),
    "env": ("keeping.env", "lock, build, list and remove sets of packages"),
    "image": (
        "keeping.stored_images",
        "pull, import, list and remove images, the roots of cells",
    ),
    "workspace": (
        "keeping.workspace",
        "list, read and change named workspaces, and commit their changes",
    ),
    "audit": ("keeping.audit", "read an audit trail and verify it"),
    "runs": ("keeping.runs", "list durable runs, decide on approvals, and resume"),
    "tools": ("keeping.tools", "create, call and list tools"),
    "skills": ("keeping.skills", "list, check, trust, keep and copy skills"),
    "agent": ("running.agent", "give a task to a model that writes programs and tools"),
    "servers": ("keeping.servers", "list MCP servers, and call and pin their tools"),
    "serve": ("serving.serve", "start a daemon that shares one pool of cells among processes"),
    "mcp": ("serving.mcp", "start an MCP server that offers cells and tools to a model"),
    "web": ("serving.web", "start an HTTP server of programs, sessions, tools and runs"),
    "judge": (
        "serving.judge_server",
        "start a server that judges programs, as SandboxFusion and Judge0 do",
    ),
    "e2b": ("serving.e2b", "start a server with the interface of E2B, whose sandboxes are cells"),
    "jupyter": ("running.jupyter", "install a kernel for notebooks, whose programs run in cells"),
    "network": (
        "serving.network",
        "list refused names of running sandboxes, and allow or deny hosts",
    ),
    "privacy": ("keeping.privacy", "find personal data in files"),
    "status": ("serving.status", "show what a daemon does now"),
    "top": ("watching.top", "show sandboxes, sessions, refusals and hosts as they happen"),
    "ps": ("serving.ps", "list the sandboxes and sessions of this user that live"),
    "kill": ("serving.kill", "end sandboxes and sessions of this user"),
    "gc": ("serving.collect", "remove what killed processes of this user left"),
    "bench": ("helping.bench", "measure the cost of cells on this machine"),
    "help": ("helping.help", "show the arguments of a command"),
    "completion": ("helping.completion", "print a completion script for a shell"),
    "man": ("helping.man", "print the manual page"),
}


def run_command(arguments: Sequence[str], spawned: "Spawned | None") -> int:
    """Run one command and return its exit status; `spawned` is a launcher started ahead for it."""
    if not arguments:
        parser_of().print_help()
        return SUCCEEDED
    options = parser_of(arguments[0]).parse_args(arguments)
    if not gc.isenabled():  # disabled by main.py, so this is the process's command
        gc.freeze()  # collections, and the interpreter's end, would traverse these objects
        gc.enable()
        warnings.showwarning = _show_warning  # type: ignore[assignment]  # it passes all on
    if spawned:
        gc.set_threshold(_THRESHOLD)
    options.spawned = spawned
    return int(options.command(options))


def _show_warning(*given: "Any") -> None:
    from .exit_status import show_warning  # seldom needed

    show_warning(*given)


def parser_of(command: str = "") -> Parser:
    """Return a parser for `command`; without one, or for an unknown one, a parser that knows the name
    and summary of each, but no arguments."""
    if (
        command in COMMANDS
    ):  # only the needed parser, because making all takes as long as parsing arguments
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

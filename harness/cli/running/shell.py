"""`cellwright shell`: a shell, or another command, at a terminal in a cell."""

import argparse
import os

from ....policies.errors import PolicyError
from ....policies.languages import PYTHON
from ..options import AUDIT_HELP, add_backend, add_gpu, add_image, add_policy, add_skills
from ..package_options import add_packages, packages_of_calls
from .sandbox_options import add_connect, sandbox_of
from .terminal_relay import TerminalRelay, is_terminal, terminal_size

_PROFILE = "workshop"
_NO_STATUS = {"timeout": None, "memory": None, "review": False}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="COMMAND",
        help="the program and its arguments; default a shell",
    )  # fmt: skip
    parser.add_argument(
        "--workspace",
        metavar="NAME",
        help="restore /workspace from this workspace, and save it after",
    )
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_connect(parser)
    add_backend(parser)
    add_image(parser)
    parser.add_argument(
        "--user", metavar="NAME",
        help="with --image: the user of the image, a name or number, that runs the command; default "
        "that of the image",
    )  # fmt: skip
    add_gpu(parser)
    add_policy(parser, default=_PROFILE)
    add_packages(parser)
    add_skills(parser, "show programs, below /skills,")
    parser.set_defaults(policy=_PROFILE, **_NO_STATUS)


def run(options: argparse.Namespace) -> int:
    if not is_terminal():
        raise PolicyError(
            "shell: standard input and output must be a terminal",
            "cellwright run executes programs without one",
        )
    rows, columns = terminal_size()
    environment = {"TERM": os.environ.get("TERM") or "xterm"}
    with (
        sandbox_of(options, PYTHON) as sandbox,
        sandbox.terminal(
            options.words or None, rows=rows, columns=columns, env=environment,
            workspace=options.workspace, packages=packages_of_calls(options),
            user=options.user,
        ) as terminal,
    ):  # fmt: skip
        TerminalRelay(terminal.fileno()).run()
        return terminal.wait()

"""`cellwright completion`: prints a script that completes commands, options and what they take.

The scripts are generated from the parser, so they answer at once.  They ask `--names` for what changes:
the names of workspaces, tools, skills and sets of packages.
"""

import argparse

from .options import SUCCEEDED

SHELLS = ("bash", "zsh", "fish")
NAMES = ("sets", "skills", "tools", "workspaces")


def add(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    wanted.add_argument(
        "--names", choices=NAMES, metavar="KIND",
        help=f"print the names of {', '.join(NAMES)} instead, as the scripts ask for them; no default",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.names:
        from .names import names_of

        for name in names_of(options.names):
            print(name)
        return SUCCEEDED
    from .commands import complete_parser
    from .completion_scripts import script

    print(script(options.shell, complete_parser()), end="")
    return SUCCEEDED

"""`cellwright completion`: prints a script that completes commands, options and their values.

The scripts are generated from the parser, so they answer at once. They ask `--names` for changing
words: the names of workspaces, tools, skills, images and sets of packages.

Names of this user's workspaces, tools, skills and packages, for the completion of a shell.
"""

import argparse
import re
from collections.abc import Iterable

from ....policies.errors import CellwrightError
from ..options import SUCCEEDED

SHELLS = ("bash", "zsh", "fish")
NAMES = ("images", "sets", "skills", "tools", "workspaces")


def add(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    wanted.add_argument(
        "--names", choices=NAMES, metavar="KIND",
        help=f"print the names of {', '.join(NAMES)} instead, as the scripts ask for them; no default",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.names:
        for name in names_of(options.names):
            print(name)
        return SUCCEEDED
    from ..commands import complete_parser
    from .completion_scripts import script

    print(script(options.shell, complete_parser()), end="")
    return SUCCEEDED


_PLAIN = re.compile(r"[\w.@-]{1,200}", re.ASCII)  # a shell must not interpret any part of a name


def names_of(kind: str) -> list[str]:
    """Return the names of `kind`, one of completion.NAMES; none if the store cannot be read."""
    try:
        return sorted({name for name in _NAMES[kind]() if _PLAIN.fullmatch(name)})
    except (CellwrightError, OSError, ImportError):
        return []


def _workspaces() -> Iterable[str]:
    from ...sandbox.workspaces.workspace_store import Workspaces

    return Workspaces().list()


def _sets() -> Iterable[str]:
    from ...sandbox.packages.package_store import PackageStore

    return [each.id[:12] for each in PackageStore().list()]


def _images() -> Iterable[str]:
    from ...sandbox.images.image_store import ImageStore

    return [name for each in ImageStore().list() for name in each.names]


def _skills() -> Iterable[str]:
    from ...skills.skills import Skills

    return [each.name for each in Skills().found()]


def _tools() -> Iterable[str]:
    from ...tools.registry import ToolRegistry
    from ..keeping.tools import default_registry

    with ToolRegistry(default_registry()) as registry:
        return [each.name for each in registry.list_tools()]


_NAMES = {
    "images": _images,
    "sets": _sets,
    "skills": _skills,
    "tools": _tools,
    "workspaces": _workspaces,
}

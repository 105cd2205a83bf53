"""`cellwright jupyter`: installs the kernel for notebooks; Jupyter starts it by this command too."""

import argparse
import sys
from functools import partial
from pathlib import Path

from ....policies.errors import PolicyError
from ....policies.languages import PYTHON
from ...text.terminal_text import ProgressLine
from ..options import SUCCEEDED, add_subcommands, policy_of, words_of
from ..package_options import packages_of_calls
from .sandbox_options import add_sandbox, sandbox_of

_DEFAULT = "workshop"
_OF_INSTALL = ("user", "prefix", "sys_prefix", "name", "display_name")


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    install = add_command(
        "install", "let Jupyter find a kernel whose programs run in a cell", _install
    )
    install.set_defaults(parser=install)
    where = install.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="for this user only")
    where.add_argument("--prefix", metavar="DIR", help="below DIR, such as a virtual environment")
    where.add_argument(
        "--sys-prefix", action="store_true", help="in the environment of this cellwright"
    )
    install.add_argument(
        "--name", default="cellwright", metavar="N", help="its name; default %(default)s"
    )
    install.add_argument(
        "--display-name", metavar="N", help="the name that people see; default made of the policy's"
    )
    kernel = add_command("kernel", "serve one notebook; Jupyter starts this", _serve)
    kernel.add_argument("-f", dest="connection_file", required=True, metavar="FILE",
                        help="the connection file that Jupyter wrote")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    return int(options.action(options))


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_sandbox(parser, "wall-clock limit of each cell of a notebook", policy=_DEFAULT)


def _install(options: argparse.Namespace) -> int:
    from ...adapters.jupyter.kernel import install

    policy = options.policy if options.connect else policy_of(options).name
    words = words_of(options, _OF_INSTALL)
    with ProgressLine("installing the kernel"):
        place = install(
            options.name, options.display_name or f"Python in a cell ({policy})",
            [sys.executable, "-I", "-m", "cellwright", "jupyter", "kernel", *words, "-f"],
            user=options.user, prefix=sys.prefix if options.sys_prefix else options.prefix,
        )  # fmt: skip
    print(f"installed kernel {options.name} in {place}")
    return SUCCEEDED


def _serve(options: argparse.Namespace) -> int:
    from ...adapters.jupyter.kernel import serve

    if not Path(options.connection_file).is_file():
        raise PolicyError(
            f"-f: there is no file {options.connection_file}",
            "`cellwright jupyter install` lets Jupyter start the kernel",
        )
    with sandbox_of(options, PYTHON) as sandbox:
        open_session = partial(
            sandbox.session, workspace=options.workspace, packages=packages_of_calls(options)
        )
        serve(options.connection_file, open_session, sandbox.policy, options.timeout)
    return SUCCEEDED

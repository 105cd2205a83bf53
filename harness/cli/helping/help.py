"""`cellwright help`: prints what `--help` of a command prints, or the table of exit codes."""

import argparse
import textwrap

from ..commands import parser_of
from ..exit_status import EXIT_CODES
from ..options import SUCCEEDED

TOPICS = ("exit-codes",)
_WIDTH = 100


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "of", nargs="*", metavar="COMMAND",
        help=f"a command, or {', '.join(TOPICS)}; default all commands",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.of in (["exit-codes"], ["exit-status"]):
        for code, meaning in EXIT_CODES.items():
            print(textwrap.fill(f"{code:>5}  {meaning}", _WIDTH, subsequent_indent=" " * 7))
        return SUCCEEDED
    parser_of(*options.of[:1]).parse_args([*options.of, "--help"])  # prints the help and exits
    return SUCCEEDED

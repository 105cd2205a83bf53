"""`cellwright help`: prints what `--help` of a command prints."""

import argparse

from .commands import parser_of
from .options import SUCCEEDED


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", nargs="*", metavar="COMMAND", help="a command; default all commands")


def run(options: argparse.Namespace) -> int:
    parser_of(*options.of[:1]).parse_args([*options.of, "--help"])  # exits
    return SUCCEEDED

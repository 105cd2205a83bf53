"""`cellwright runs`: what waits for a person, and the person's word."""

import argparse
import sys
import time
from collections.abc import Callable

import msgspec

from ..cli.terminal import harmless
from .runs import Runs

_WELL, _DOES_NOT_WAIT = 0, 1
Command = Callable[[Runs, argparse.Namespace], int]


def add_runs(runs: argparse.ArgumentParser) -> None:
    """Add the commands about runs that wait."""
    commands = runs.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, summary: str, command: Command) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=summary)
        parser.add_argument("file", metavar="FILE", help="where the runs are kept")
        parser.set_defaults(command=_carry_out, carry_out=command)
        return parser

    pending = add("pending", "what waits for a word", _pending)
    pending.add_argument("--json", action="store_true", help="one JSON array on stdout")
    for name, summary, command in (
        ("approve", "let one call be made, as it is", _approve),
        ("reject", "refuse it", _reject),
    ):
        decides = add(name, summary, command)
        decides.add_argument("approval", metavar="APPROVAL", help="its name, as pending tells it")
        if name == "reject":
            decides.add_argument(
                "why", nargs="?", default="", metavar="WHY", help="for the program"
            )
    add("expire", "refuse what has waited too long", _expire)


def _carry_out(options: argparse.Namespace) -> int:
    with Runs(options.file) as runs:
        return int(options.carry_out(runs, options))


def _pending(runs: Runs, options: argparse.Namespace) -> int:
    waiting = runs.pending()
    if options.json:
        told = [each._asdict() for each in waiting]
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        return _WELL
    for each in waiting:
        arguments = msgspec.json.encode(each.arguments).decode()
        minutes = max(0.0, each.expires - time.time()) / 60
        print(f"{each.approval}  {each.tool} {harmless(arguments)}")
        print(f"    {harmless(each.reason)}; run {each.run}; {minutes:.0f} minutes left")
    return _WELL


def _approve(runs: Runs, options: argparse.Namespace) -> int:
    return _told(runs.approve(options.approval), options.approval)


def _reject(runs: Runs, options: argparse.Namespace) -> int:
    return _told(runs.reject(options.approval, options.why), options.approval)


def _expire(runs: Runs, _: argparse.Namespace) -> int:
    print(runs.expire())
    return _WELL


def _told(waited: bool, approval: str) -> int:
    if not waited:
        print(f"cellwright: {harmless(approval)} does not wait for a word", file=sys.stderr)
    return _WELL if waited else _DOES_NOT_WAIT

"""`cellwright kill`: ends sandboxes and sessions of this user's processes."""

import argparse

from ....policies.errors import PolicyError
from ....runner.launching.living import Living, kill, list_living
from ..options import SUCCEEDED, add_json, print_json


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", metavar="ID", nargs="*",
        help="an ID of `cellwright ps`, or the pid of a process, all of whose sandboxes "
        "are ended; no default",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="end every sandbox of this user")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if bool(options.id) == options.all:
        raise PolicyError("ID: name what to end, or give --all", "`cellwright ps` lists what lives")
    living = list_living()
    chosen = [each for each in living if options.all or _is_named(each, options.id)]
    for name in options.id:
        if not any(_is_named(each, [name]) for each in chosen):
            raise PolicyError(f"ID: nothing with the id {name!r} lives", "see `cellwright ps`")
    ended = [each.id for each in chosen if kill(each)]
    if options.json:
        print_json(ended)
    else:
        print("".join(f"ended {id}\n" for id in ended), end="")
    return SUCCEEDED


def _is_named(living: Living, names: list[str]) -> bool:
    """Tell whether an id or a pid among `names` is that of `living`; a pid names its sandboxes, whose
    sessions end with them."""
    is_sandbox = living.record.kind == "sandbox"
    return living.id in names or (is_sandbox and str(living.record.supervisor.pid) in names)

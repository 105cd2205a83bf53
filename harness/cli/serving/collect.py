"""`cellwright gc`: removes what killed processes of this user left: cgroups, frozen cells, sockets,
containers."""

import argparse

from ....runner.launching.living import remove_leftovers
from ....runner.oci.container import remove_leftover_containers
from ...text.terminal_text import harmless_line
from ..options import SUCCEEDED, add_json, print_json


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    removed = remove_leftovers() + remove_leftover_containers()
    if options.json:
        print_json(removed)
    else:
        print("".join(f"removed {harmless_line(path)}\n" for path in removed), end="")
    return SUCCEEDED

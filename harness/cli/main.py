"""The entry point of the command line: `cellwright run`, `repl`, `doctor` and their kin.

stdout carries the program's own output or JSON; everything else goes to stderr.  Exit status: 0 ran
well, 1 the program failed, 2 wrong usage, 70 the sandbox failed.
"""

import sys
from collections.abc import Sequence

from ...runner.spawn import Spawned, interpreter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # First of all: a launcher imports as long as we do, so let it begin.
    elsewhere = any(each.startswith("--con") for each in arguments)
    alone = arguments[:1] in (["run"], ["repl"]) and not elsewhere
    spawned = Spawned(interpreter()) if alone else None
    from .commands import carry_out

    return carry_out(arguments, spawned)

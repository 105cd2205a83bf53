"""The entry point of the command line: `cellwright run`, `repl`, `doctor` and their kin.

stdout carries the program's own output or JSON; everything else goes to stderr.  Exit status: 0 the
program ran well, 1 it failed, 2 wrong usage, 70 the sandbox failed, 130 interrupted by Ctrl-C, 141
nobody reads the output any more.
"""

import os
import sys
from collections.abc import Sequence

from ...runner.spawn import Spawned, interpreter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; prints no traceback but that of a bug of ours.

    As the command of its process (without `arguments`) it ends by SIGINT after Ctrl-C, so that a
    shell's loop around it ends too.
    """
    try:
        _open_standard_streams()
        status = _carry_out(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # here, where a failure is caught, and not when the interpreter ends
    except BaseException as failure:  # noqa: BLE001 - the outermost caller
        from .endings import status_of

        return status_of(failure, is_command=arguments is None)
    return status


def _carry_out(arguments: Sequence[str]) -> int:
    # First of all: a launcher imports as long as we do, so let it begin.
    elsewhere = any(each.startswith("--con") for each in arguments)
    alone = arguments[:1] in (["run"], ["repl"]) and not elsewhere
    spawned = Spawned(interpreter()) if alone else None
    from .commands import carry_out

    return carry_out(arguments, spawned)


def _open_standard_streams() -> None:
    """Open /dev/null where the caller closed a standard stream: a file of ours would get its number."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115

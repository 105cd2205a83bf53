"""A program in a cell whose standard streams are those of this process: `python -m` this module.

The process that starts it gets a `subprocess.Popen`, and ends the cell by killing this process.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...policies.errors import CellwrightError
from ...policies.policy import Policy
from ...policies.profiles.loading import load_policy, policy_of_data
from ..sandbox.sandbox import Sandbox

SCRIPT = "cellwright.harness.adapters.stdio"
_CHUNK = 65536
_FAILED = 70  # the exit status of `cellwright` for its own failures
# The limits count for the whole life of the program.
DEFAULT_POLICY: Mapping[str, Any] = {
    "extends": "workshop", "limits": {"wall_seconds": 86_400.0, "cpu_seconds": 86_400.0},
}  # fmt: skip


class ShellArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command in the cell; `shown`: a directory of the host in which it starts and may write."""

    policy: str | Mapping[str, Any]
    command: tuple[str, ...]
    env: dict[str, str]
    shown: str | None

    @contextlib.contextmanager
    def passed(self) -> Iterator[int]:
        """Give a descriptor from which a child process reads this."""
        descriptor = os.memfd_create("cellwright-arguments")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(msgspec.json.encode(self))
            yield descriptor
        finally:
            os.close(descriptor)


def _arguments(descriptor: int) -> ShellArguments:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return msgspec.json.decode(file.read(), type=ShellArguments)


def _policy(given: ShellArguments) -> Policy:
    name = given.policy
    policy = load_policy(name) if isinstance(name, str) else policy_of_data(name)
    if given.shown is None:
        return policy
    write = (*policy.filesystem.write, given.shown)
    filesystem = msgspec.structs.replace(policy.filesystem, write=write)
    return msgspec.structs.replace(policy, filesystem=filesystem)


def _run(given: ShellArguments) -> int:
    """Run the program to its end, and return its exit code; its standard error is its output too."""
    argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *given.command]
    with (
        Sandbox(policy=_policy(given), pool=0, audit=False) as sandbox,
        sandbox.program(argv, env=given.env, cwd=given.shown) as program,
    ):
        threading.Thread(target=_copy_input, args=(program,), daemon=True).start()
        while data := os.read(program.stdout, _CHUNK):
            os.write(sys.stdout.fileno(), data)
        result = program.wait()
        if result.exit_code is None:
            print(f"cellwright: {result.error or result.reason}", flush=True)
        return _FAILED if result.exit_code is None else result.exit_code


def _copy_input(program: Any) -> None:
    with contextlib.suppress(OSError):  # the program has ended
        while data := os.read(sys.stdin.fileno(), _CHUNK):
            while data:
                data = data[os.write(program.stdin, data) :]
    program.close_stdin()


def main() -> None:
    """Run the command that is read from the descriptor in the only argument."""
    try:
        code = _run(_arguments(int(sys.argv[1])))
    except CellwrightError as error:
        print(f"cellwright: {error}", file=sys.stderr)
        code = _FAILED
    os._exit(code)  # a thread may wait for input


if __name__ == "__main__":
    main()

"""The entry point of the command `cellwright`: runs one command and turns its end into an exit status.

stdout carries the program's own output or JSON; everything else goes to stderr.  EXIT_CODES of
exit_status.py lists the exit statuses.
"""

import atexit
import gc
import os
import sys

TYPE_CHECKING = False  # `--version` needs neither `typing` nor the imports of `contextlib`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn


_STARTING = ("run", "exec", "repl", "shell")  # these commands start a launcher first


def command() -> "NoReturn":
    """Run the command of this process, and end the process with its exit status.

    Without taking down the interpreter, where nothing depends on that: it takes as long as a call.
    """
    status = main()
    threading = sys.modules.get("threading")
    if threading and any(not each.daemon for each in _others(threading)):
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # main has already reported output errors
            continue
    os._exit(status)


def _others(threading: "Any") -> "list[Any]":
    """Return the threads other than the main one."""
    return [each for each in threading.enumerate() if each is not threading.main_thread()]


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run one command and return its exit status; print a traceback only for a bug of cellwright.

    Without `arguments` it runs as the command of this process: after Ctrl-C it ends this process by
    SIGINT, so that a shell's loop around the command ends too.
    """
    if arguments is None:
        gc.disable()  # imported objects stay anyway; commands.py enables collection again
    try:
        _open_standard_streams()
        status = _run_command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # flushed here, where a failure can be caught
    except BaseException as failure:  # noqa: BLE001 - the outermost caller
        from .exit_status import status_of

        return status_of(failure, is_command=arguments is None)
    return status


def _run_command(arguments: "Sequence[str]") -> int:
    if list(arguments) == [
        "--version"
    ]:  # before argparse is imported, which takes longer than that
        from ..version import version_line

        print(version_line())
        return 0
    if arguments and arguments[0] in ("exec", "run"):
        status = (_by_daemon if arguments[0] == "exec" else _in_daemon)(arguments[1:])
        if status is not None:
            return status
    spawned = None
    # Start the launcher first, because its imports take as long as those of this process. argparse
    # accepts prefixes of options. A daemon, another Python, fixed addresses, containers and images
    # need another launcher, an explanation and hooks none.
    if (
        arguments
        and arguments[0] in _STARTING
        and not any(
            each.startswith(("--con", "--py", "--pau", "--ba", "--im", "--expl", "--print"))
            for each in arguments
        )
    ):
        from ...runner.launching.spawn import Spawned, interpreter

        spawned = Spawned(interpreter())
    if arguments and arguments[0] in (*_STARTING, "serve"):
        from ...runner import lean_msgspec  # noqa: F401
    from . import lean_argparse  # noqa: F401
    from .commands import run_command

    try:
        return run_command(arguments, spawned)
    finally:
        if spawned:
            spawned.close()


def _by_daemon(arguments: "Sequence[str]") -> "int | None":
    """Run a command of `exec` in the open cell of its project, if a daemon has one."""
    from . import open_cell_client as client

    path = client.socket_path(arguments)
    return client.attempt(arguments, path) if path and os.path.exists(path) else None


def _in_daemon(arguments: "Sequence[str]") -> "int | None":
    """Run a command of `run` in the daemon of --connect, if it needs no more than the usual options."""
    if not any(each.startswith("--connect") for each in arguments):
        return None
    from .daemon_run import attempt

    return attempt(arguments)


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed; else the next file that this
    process opens would get its number, and output would go there."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115

"""The exit codes of the command, and the message on stderr of a command that ends with an exception.

Warnings on the command line: those of cellwright are one line each on stderr, printed once.
"""

import contextlib
import errno
import os
import select
import signal
import sys
import warnings
from typing import TextIO

from ..text.terminal_text import harmless
from .options import SANDBOX_FAILED, USAGE_ERROR

_INTERRUPTED = 128 + signal.SIGINT
_OUTPUT_CLOSED = 128 + signal.SIGPIPE
# For `cellwright help exit-codes`, the manual page, and the table of harness/cli/README.md.
EXIT_CODES = {
    "0": "the program succeeded, or the command did what it was asked to",
    "1": "the program failed, `--collect` left something out, or a check found something, such as a "
    "change of an audit trail",
    "2": "wrong usage: an unknown command or option, an invalid policy or value, a missing extra, or "
    "a name of something that is not there: a file, a set of packages, an interpreter, a runtime",
    "70": "the sandbox failed, no daemon answers, a check of `cellwright doctor` failed, or the output "
    "cannot be written",
    "130": "interrupted by Ctrl-C. Nothing is printed; the command ends by SIGINT, so that a shell's "
    "loop around it ends too",
    "141": "the reader of the output, such as head(1), has closed the pipe. Nothing is printed",
    "128+N": "ended by signal N, as a shell reports it: 143 by SIGTERM, 129 by SIGHUP",
}
# Errors that the caller can avoid by naming another file; all others are failures of the machine.
_WRONG_FILE = frozenset((
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EROFS,
    errno.ELOOP, errno.ENAMETOOLONG,
))  # fmt: skip


def status_of(failure: BaseException, *, is_command: bool) -> int:
    """Print what `failure` means to stderr, and return the exit status.

    With `is_command` a KeyboardInterrupt ends this process by SIGINT.
    """
    if isinstance(failure, KeyboardInterrupt):
        return _interrupted(is_command=is_command)
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = failure if isinstance(failure, OSError) else error
    if isinstance(failure, BrokenPipeError) and _is_output_closed():
        _discard_output()
        return _OUTPUT_CLOSED
    status, text = _message_of(failure)
    with contextlib.suppress(OSError):  # stderr may be the stream that cannot be written
        sys.stderr.write(text)
        sys.stderr.flush()
    _discard_output()
    return status


def _message_of(failure: BaseException) -> tuple[int, str]:
    """Return the exit status and the text for stderr."""
    if isinstance(failure, SystemExit):  # argparse has printed its message
        return (failure.code if isinstance(failure.code, int) else int(bool(failure.code))), ""
    from ...policies import errors  # `--version` does not need it

    if isinstance(failure, errors.CellwrightError):
        is_opening = isinstance(failure, errors.AuditError | errors.RegistryError)
        is_wrong_file = is_opening and getattr(failure.__cause__, "errno", None) in _WRONG_FILE
        status = USAGE_ERROR if is_wrong_file else failure.exit_code
        return status, f"cellwright: {_harmless(str(failure))}\n"
    if isinstance(failure, OSError):
        what = f"{failure.filename}: " if failure.filename else ""
        status = USAGE_ERROR if what and failure.errno in _WRONG_FILE else SANDBOX_FAILED
        return (
            status,
            f"cellwright: {what or 'cannot write the output: '}{failure.strerror or failure}\n",
        )
    if isinstance(failure, MemoryError):
        return SANDBOX_FAILED, "cellwright: out of memory\n"
    import traceback

    return SANDBOX_FAILED, "".join(
        traceback.format_exception(failure)
    ) + "cellwright: this is a bug in cellwright, please report it\n"


def _harmless(text: str) -> str:
    """Return a message that may quote an index, a server or a file, for a terminal, line by line."""
    return "\n".join(map(harmless, text.split("\n")))


def _interrupted(*, is_command: bool) -> int:
    _discard_output()
    if is_command:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(
            os.getpid(), signal.SIGINT
        )  # a shell then sees the signal by wait(2) and ends its loop
    return _INTERRUPTED


def _is_output_closed() -> bool:
    """Tell whether stdout or stderr is a pipe without a reader: a broken pipe elsewhere is a bug."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)  # POLLERR needs no request (poll(2))
    return any(events & select.POLLERR for _, events in streams.poll(0))


def _discard_output() -> None:
    """Send buffered output to /dev/null if it cannot be written: else the interpreter reports an error
    as it ends."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


_OURS = os.path.join(os.path.dirname(__file__).removesuffix("harness/cli"), "")
_shown: set[str] = set()


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """Print a warning; one of other code, such as a file of --tools, with its file and line."""
    text = " ".join(str(message).split())
    if not filename.startswith(_OURS):
        shown = warnings.formatwarning(message, category, filename, lineno, line)
    elif text not in _shown:
        _shown.add(text)
        shown = f"cellwright: {harmless(text)}\n"
    else:
        return
    (file or sys.stderr).write(shown)

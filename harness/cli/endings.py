"""The exit status, and the one line on stderr, of a command that an exception ended."""

import contextlib
import errno
import os
import select
import signal
import sys
import traceback

from ...policies.errors import CellwrightError, PolicyError
from .options import OURS, USAGE

_INTERRUPTED = 128 + signal.SIGINT
_NO_READER = 128 + signal.SIGPIPE
# What the caller can mend by naming another file; anything else is a failure of the machine.
_OF_THE_NAME = frozenset((
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EROFS,
    errno.ELOOP, errno.ENAMETOOLONG,
))  # fmt: skip


def status_of(failure: BaseException, *, is_command: bool) -> int:
    """Say on stderr what `failure` means, and return the exit status.

    With `is_command` a KeyboardInterrupt ends this process by SIGINT.
    """
    if isinstance(failure, KeyboardInterrupt):
        return _interrupted(is_command=is_command)
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = failure if isinstance(failure, OSError) else error
    if isinstance(failure, BrokenPipeError) and _has_lost_its_reader():
        _discard_output()
        return _NO_READER
    status, text = _told(failure)
    with contextlib.suppress(OSError):  # stderr may be the stream that cannot be written
        sys.stderr.write(text)
        sys.stderr.flush()
    _discard_output()
    return status


def _told(failure: BaseException) -> tuple[int, str]:
    """Return the exit status and what stderr says."""
    if isinstance(failure, SystemExit):  # argparse has printed its own words
        return (failure.code if isinstance(failure.code, int) else int(bool(failure.code))), ""
    if isinstance(failure, CellwrightError):
        status = USAGE if isinstance(failure, PolicyError) else OURS
        return status, f"cellwright: {failure}\n"
    if isinstance(failure, OSError):
        what = f"{failure.filename}: " if failure.filename else ""
        status = USAGE if what and failure.errno in _OF_THE_NAME else OURS
        return (
            status,
            f"cellwright: {what or 'cannot write the output: '}{failure.strerror or failure}\n",
        )
    if isinstance(failure, MemoryError):
        return OURS, "cellwright: this process has no memory left\n"
    return OURS, "".join(
        traceback.format_exception(failure)
    ) + "cellwright: this is a bug of ours\n"


def _interrupted(*, is_command: bool) -> int:
    _discard_output()
    if is_command:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # wait(2) then tells a shell, which ends its loop
    return _INTERRUPTED


def _has_lost_its_reader() -> bool:
    """Tell whether stdout or stderr is a pipe that nobody reads: another broken pipe is a bug."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)  # POLLERR is always told (poll(2))
    return any(events & select.POLLERR for _, events in streams.poll(0))


def _discard_output() -> None:
    """Send what is still buffered to /dev/null: the interpreter would complain of it as it ends."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""Exceptions of ours as frames, and back."""

import errno
import traceback

from ....policies import errors
from ....policies.errors import CellwrightError, LauncherLost, Unenforceable
from .frames import Failure

_LONGEST = 10_000  # characters of a message, which may repeat what a client said
_KINDS: dict[str, type[CellwrightError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CellwrightError)
}


def failure_of(error: Exception) -> Failure:
    """Return what to tell a client; a bug of ours is told to our own stderr as well."""
    if isinstance(error, CellwrightError):
        return Failure(
            type(error).__name__,
            error.what[:_LONGEST],
            error.hint[:_LONGEST],
            error.gaps if isinstance(error, Unenforceable) else (),
            isinstance(error, LauncherLost) and error.cell_began,
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "try again later, or raise LimitNOFILE= of its service"
        return Failure("BusyError", "the daemon has no descriptor left", hint)
    traceback.print_exception(error)
    return Failure("InternalError", f"the daemon failed: {type(error).__name__}: {error}")


def error_of(failure: Failure) -> CellwrightError:
    """Return the exception that a frame tells of."""
    kind = _KINDS.get(failure.kind, errors.InternalError)
    error = kind.__new__(kind)
    CellwrightError.__init__(error, failure.message, failure.hint)  # theirs take other arguments
    if isinstance(error, Unenforceable):
        error.gaps = failure.gaps
    if isinstance(error, LauncherLost):
        error.cell_began = failure.cell_began
    return error

"""Conversion between exceptions of policies/errors.py and Failure frames."""

import errno

from ....policies import errors
from ....policies.errors import (
    CellwrightError,
    LauncherLost,
    PauseDiffers,
    QuotaExceeded,
    SessionExpired,
    Unenforceable,
)
from .frames import Failure

_LONGEST = 10_000  # characters of a message, which may quote what a client sent
_KINDS: dict[str, type[CellwrightError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CellwrightError)
}


def failure_of(error: Exception) -> Failure:
    """Return the frame for a client; an exception that is a bug of ours is also printed to stderr."""
    if isinstance(error, CellwrightError):
        return Failure(
            type(error).__name__,
            error.what[:_LONGEST],
            error.hint[:_LONGEST],
            error.gaps if isinstance(error, Unenforceable) else (),
            isinstance(error, LauncherLost) and error.cell_began,
            error.limit if isinstance(error, SessionExpired | QuotaExceeded) else "",
            error.differs if isinstance(error, PauseDiffers) else (),
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "try again later, or raise LimitNOFILE= of its service"
        return Failure("BusyError", "the daemon has no free file descriptor", hint)
    import traceback  # only in a daemon, and only for a bug

    traceback.print_exception(error)
    return Failure("InternalError", f"the daemon failed: {type(error).__name__}: {error}")


def error_of(failure: Failure) -> CellwrightError:
    """Return the exception that a frame describes."""
    kind = _KINDS.get(failure.kind, errors.InternalError)
    error = kind.__new__(kind)
    CellwrightError.__init__(
        error, failure.message, failure.hint
    )  # subclasses take other arguments
    if isinstance(error, Unenforceable):
        error.gaps = failure.gaps
    if isinstance(error, LauncherLost):
        error.cell_began = failure.cell_began
    if isinstance(error, SessionExpired | QuotaExceeded):
        error.limit = failure.limit
    if isinstance(error, PauseDiffers):
        error.differs = failure.differs
    return error

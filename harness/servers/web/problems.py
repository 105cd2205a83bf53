"""Problems: the answers to requests that fail, as application/problem+json (RFC 9457)."""

import msgspec

from ....policies.errors import (
    ApprovalRequired,
    BusyError,
    CellwrightError,
    ClosedError,
    ModelError,
    PackageError,
    PauseError,
    PolicyError,
    SessionLost,
    SkillNotFound,
    ToolBudgetExceeded,
    ToolDenied,
    ToolError,
    ToolNotFound,
    WorkspaceError,
)
from ...text.terminal import harmless

_MOST_CHARACTERS = 8000  # of a message, which may quote a program


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that failed: `title` names the kind of the error, `detail` says what failed, and `hint`
    what to do."""

    status: int
    title: str
    detail: str
    hint: str = ""


class RequestRefused(CellwrightError):  # noqa: N818 - it reads as a verdict
    """A request that cannot be answered; `status` is that of HTTP."""

    def __init__(self, status: int, title: str, detail: str, hint: str = "") -> None:
        super().__init__(detail, hint)
        self.status = status
        self.title = title


# The first class that fits decides; ToolNotFound comes before ToolError, and so on.
_STATUS: tuple[tuple[type[CellwrightError], int, str], ...] = (
    (PolicyError, 422, "invalid"),
    (BusyError, 429, "busy"),
    (ToolBudgetExceeded, 429, "too_fast"),
    (SessionLost, 404, "session_lost"),
    (PauseError, 409, "pause"),
    (WorkspaceError, 422, "file"),
    (PackageError, 422, "packages"),
    (SkillNotFound, 404, "not_found"),
    (ToolNotFound, 404, "not_found"),
    (ApprovalRequired, 403, "approval_required"),
    (ToolDenied, 403, "denied"),
    (ToolError, 422, "tool"),
    (ModelError, 502, "model"),
    (ClosedError, 503, "closing"),
)


def problem_of(error: Exception) -> Problem:
    """Return the answer to a request that raised an exception; a bug is told without its details."""
    if isinstance(error, RequestRefused):
        return _problem(error.status, error.title, error)
    for kind, status, title in _STATUS:
        if isinstance(error, kind):
            return _problem(status, title, error)
    if isinstance(error, CellwrightError):
        return _problem(500, "failed", error)
    return Problem(status=500, title="bug", detail="the server failed: see its standard error")


def _problem(status: int, title: str, error: CellwrightError) -> Problem:
    detail, hint = (harmless(each)[:_MOST_CHARACTERS] for each in (error.what, error.hint))
    return Problem(status=status, title=title, detail=detail, hint=hint)

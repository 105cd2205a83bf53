"""Every exception of cellwright.

    CellwrightError
    ├── PolicyError          a policy, a configuration or an argument that makes no sense
    ├── Unenforceable        this host cannot give a layer that the policy requires
    ├── LaunchError          a cell or its launcher could not be built
    │   └── LauncherLost     the launcher ended, and every cell with it
    ├── AuditError           the audit trail cannot be opened or written
    ├── BudgetExceeded       work on untrusted input took more steps or time than it may
    ├── BusyError            no room for another execution now
    ├── ClosedError          the sandbox was closed
    ├── SessionLost          the cell of a session is gone, and its state with it
    ├── WorkspaceError       a file of a session, or a named workspace, cannot be had or written
    ├── ToolError            of tools, and of calls of them
    │   ├── ToolNotFound         there is none of that name
    │   ├── ToolInvalid          it cannot be a tool: its name, its source or its schema
    │   │   └── ToolTestFailed       its own tests say that it does not work
    │   ├── ToolExists           the name is taken, or another tool does the same
    │   ├── ToolDenied           the caller may not
    │   │   └── ApprovalRequired     nobody has approved the call
    │   ├── ToolBudgetExceeded   the caller has called too many, or too fast
    │   ├── ToolQuotaExceeded    the maker's tools take all the room that one maker has
    │   ├── ToolArgumentsInvalid the arguments are not what its schema says
    │   ├── ToolResultInvalid    the result is not what its schema says
    │   ├── ToolResultTooLarge   the result is longer than the caller's policy allows
    │   ├── ToolDiverged         a run that was resumed calls something else than before
    │   ├── ToolOutcomeUnknown   it was begun, and nobody knows what came of it
    │   └── ToolFailed           it was called and did not answer
    ├── RegistryError        the registry of tools cannot be opened, read or written
    └── InternalError        a bug of ours

What untrusted code does is never an exception: it is a result.
"""

from typing import Any, ClassVar, Literal


class CellwrightError(Exception):
    """The root of the tree; `what` says what happened, `hint` what to do about it.

    `kind` is the word by which a program in a cell knows it, if a call of a tool ends in it.
    """

    kind: ClassVar[str] = "failed"

    def __init__(self, message: str, hint: str = "") -> None:
        # A message that quotes another exception has its hint too: there is one, at the end.
        message, *quoted = message.split("\nhint: ")
        hint = hint or (quoted[0] if quoted else "")
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.what = message
        self.hint = hint


class PolicyError(CellwrightError, ValueError):
    """A policy, a configuration or an argument that makes no sense."""


class Unenforceable(CellwrightError):  # noqa: N818 - it reads as a verdict: "unenforceable: ..."
    """This host cannot give what the policy requires; `gaps` names each missing layer and why."""

    def __init__(self, gaps: tuple[tuple[str, str], ...], hint: str = "") -> None:
        lines = "\n".join(f"  {layer}: {reason}" for layer, reason in gaps)
        super().__init__(f"this host cannot enforce the policy:\n{lines}", hint)
        self.gaps = gaps


class LaunchError(CellwrightError):
    """A cell or its launcher could not be built: which step, what the kernel answered."""


class LauncherLost(LaunchError):  # noqa: N818 - what happened, not a mistake
    """The launcher ended; `cell_began` tells whether the guest may have run."""

    def __init__(self, cell_began: bool) -> None:
        super().__init__("the launcher died" + (" while the cell ran" if cell_began else ""))
        self.cell_began = cell_began


class BudgetExceeded(CellwrightError):  # noqa: N818 - it reads as a verdict
    """Work of the host on untrusted input was ended because its budget was used up.

    `cause` says by what: the number of steps, the time, or the caller, who gave up.
    """

    kind = "budget"

    def __init__(
        self, message: str, hint: str = "", *,
        cause: Literal["steps", "wall_time", "cancelled"] = "steps",
    ) -> None:  # fmt: skip
        super().__init__(message, hint)
        self.cause = cause


class BusyError(CellwrightError):
    """No room for another execution now; try again later."""


class AuditError(CellwrightError):
    """The audit trail cannot be opened or written."""


class ClosedError(CellwrightError):
    """The sandbox was closed."""


class SessionLost(CellwrightError):  # noqa: N818 - what happened, not a mistake
    """The cell of a session is gone, and its state with it; the message says why."""


class WorkspaceError(CellwrightError):
    """A file of a session, or a named workspace, cannot be had or cannot be written."""


class ToolError(CellwrightError):
    """Of tools, and of calls of them; `tool` is its name."""

    def __init__(self, message: str, hint: str = "", *, tool: str = "") -> None:
        super().__init__(message, hint)
        self.tool = tool


class ToolNotFound(ToolError):  # noqa: N818 - like all of these, what happened
    """There is no tool of that name."""

    kind = "not_found"


class ToolInvalid(ToolError, ValueError):  # noqa: N818
    """It cannot be a tool: its name, its source or its schema."""


class ToolTestFailed(ToolInvalid):
    """A tool's own tests say that it does not work; `result` is what came of them in the cell."""

    def __init__(self, message: str, hint: str = "", *, tool: str = "", result: Any = None) -> None:
        super().__init__(message, hint, tool=tool)
        self.result = result


class ToolExists(ToolError):  # noqa: N818
    """The name is taken, or another tool does the same; `existing` is the name of that one."""

    def __init__(self, message: str, hint: str = "", *, tool: str = "", existing: str = "") -> None:
        super().__init__(message, hint, tool=tool)
        self.existing = existing


class ToolDenied(ToolError):  # noqa: N818
    """The caller may not."""

    kind = "denied"


class ToolBudgetExceeded(ToolError):  # noqa: N818
    """The caller has called too many tools, or too fast; `times` is how often, this one included."""

    kind = "budget"
    times = 0


class ApprovalRequired(ToolDenied):
    """A person has to approve the call, and nobody has."""

    kind = "not_approved"


class ToolQuotaExceeded(ToolError):  # noqa: N818
    """The tools of one maker would take more than its quota of bytes or versions."""

    kind = "quota"


class ToolArgumentsInvalid(ToolError, ValueError):  # noqa: N818
    """The arguments are not what the tool's schema says."""

    kind = "invalid_arguments"


class ToolResultInvalid(ToolError):  # noqa: N818
    """The result is not what the tool's schema says."""

    kind = "invalid_result"


class ToolResultTooLarge(ToolError):  # noqa: N818
    """The result is longer than `tools.result_bytes`; `result_id`, if not empty, is by what it can be
    read: results.read_all, results.read."""

    kind = "too_large"

    def __init__(
        self, message: str, hint: str = "", *, tool: str = "", result_id: str = ""
    ) -> None:
        super().__init__(message, hint, tool=tool)
        self.result_id = result_id


class ToolDiverged(ToolError):  # noqa: N818
    """A run that was resumed calls something else than it called at that place before."""

    kind = "diverged"


class ToolOutcomeUnknown(ToolError):  # noqa: N818
    """The call was begun, and nobody knows what came of it; to make it again could do it twice."""

    kind = "unknown"


class ToolFailed(ToolError):  # noqa: N818
    """A tool was called and did not answer; `result` is what came of its cell, if it has one."""

    def __init__(self, message: str, hint: str = "", *, tool: str = "", result: Any = None) -> None:
        super().__init__(message, hint, tool=tool)
        self.result = result


class RegistryError(CellwrightError):
    """The registry of tools cannot be opened, read or written."""


class InternalError(CellwrightError):
    """A bug of ours."""

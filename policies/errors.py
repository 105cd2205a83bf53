"""Every exception of cellwright.

    CellwrightError
    ├── PolicyError          a policy, a configuration or an argument that makes no sense
    ├── Unenforceable        this host cannot give a layer that the policy requires
    ├── LaunchError          a cell or its launcher could not be built
    │   └── LauncherLost     the launcher ended, and every cell with it
    ├── AuditError           the audit trail cannot be opened or written
    ├── BusyError            no room for another execution now
    ├── ClosedError          the sandbox was closed
    ├── SessionLost          the cell of a session is gone, and its state with it
    ├── WorkspaceError       a file of a session cannot be had, or cannot be put there
    └── InternalError        a bug of ours

What untrusted code does is never an exception: it is a result.
"""


class CellwrightError(Exception):
    """The root of the tree; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.hint = hint


class PolicyError(CellwrightError, ValueError):
    """A policy, a configuration or an argument that makes no sense."""


class Unenforceable(CellwrightError):  # noqa: N818 - it reads as a verdict: "unenforceable: ..."
    """This host cannot give what the policy requires; `gaps` names each missing layer and why."""

    def __init__(self, gaps: tuple[tuple[str, str], ...]) -> None:
        lines = "\n".join(f"  {layer}: {reason}" for layer, reason in gaps)
        hint = 'run "cellwright doctor"; a policy may name a layer optional'
        super().__init__(f"this host cannot enforce the policy:\n{lines}", hint)
        self.gaps = gaps


class LaunchError(CellwrightError):
    """A cell or its launcher could not be built: which step, what the kernel answered."""


class LauncherLost(LaunchError):  # noqa: N818 - what happened, not a mistake
    """The launcher ended; `cell_began` tells whether the guest may have run."""

    def __init__(self, cell_began: bool) -> None:
        super().__init__("the launcher died" + (" while the cell ran" if cell_began else ""))
        self.cell_began = cell_began


class BusyError(CellwrightError):
    """No room for another execution now; try again later."""


class AuditError(CellwrightError):
    """The audit trail cannot be opened or written."""


class ClosedError(CellwrightError):
    """The sandbox was closed."""


class SessionLost(CellwrightError):  # noqa: N818 - what happened, not a mistake
    """The cell of a session is gone, and its state with it; the message says why."""


class WorkspaceError(CellwrightError):
    """A file of a session cannot be had, or cannot be put there."""


class InternalError(CellwrightError):
    """A bug of ours."""

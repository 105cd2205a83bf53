"""Every exception of cellwright.

    CellwrightError
    ├── PolicyError          a policy, a configuration or an argument is invalid
    ├── Unenforceable        this host lacks a layer that the policy requires
    ├── LaunchError          a cell or its launcher could not be built
    │   ├── LauncherLost     the launcher ended, and all its cells with it
    │   └── Unavailable      the named interpreter or runtime cannot be used; also a PolicyError
    ├── BuildFailed          a command of a Dockerfile failed: `line`, `output` and its exit status
    ├── AuditError           the audit trail cannot be opened or written
    ├── BudgetExceeded       work on untrusted input exceeded its steps or time
    ├── BusyError            no free slot for another execution now
    │   └── QuotaExceeded        a client, or a tenant of a daemon, uses as much as it may
    ├── ClosedError          the sandbox was closed
    ├── SessionLost          the cell of a session ended, and its state is lost
    │   └── SessionExpired       it was idle, or lived, for as long as it may
    ├── NodeLost             a node of a fleet was lost: `node` names it
    │   ├── OutcomeUnknown       and a call that it may have begun is not repeated
    │   └── SessionNodeLost      and a session with it; also a SessionLost
    ├── PauseError           a session cannot be paused, or a paused one cannot be resumed
    │   └── PauseDiffers         what it needs is different by now: `differs` names it
    ├── WorkspaceError       a file of a session, or a named workspace, cannot be read or written
    ├── PackageError         packages cannot be resolved, fetched, opened or kept
    │   └── PackageNotFound      the named set or file, or the extra, is not there; also a PolicyError
    ├── SkillError           a skill cannot be read, kept or used
    │   ├── SkillInvalid         its files or its SKILL.md are invalid
    │   ├── SkillNotFound        no skill has that name
    │   └── SkillUntrusted       nobody trusted these files
    ├── ModelError           a model's server refuses a request, or its answer is invalid
    │   └── ModelUnavailable     it does not answer now: the agent's run can be resumed
    ├── ToolError            an error of a tool or of a call of it
    │   ├── ToolNotFound         no tool has that name
    │   ├── ToolInvalid          the name, the source or a schema of the tool is invalid
    │   │   └── ToolTestFailed       the tool's own tests failed
    │   ├── ToolExists           the name is in use, or another tool does the same
    │   ├── ToolDenied           the caller may not make the call
    │   │   └── ApprovalRequired     the call needs the approval of a person
    │   ├── ToolBudgetExceeded   the caller made too many calls, or too fast
    │   ├── ToolQuotaExceeded    the tools of one maker exceed its quota
    │   ├── ToolArgumentsInvalid the arguments do not match the tool's schema
    │   ├── ToolResultInvalid    the result does not match the tool's schema
    │   ├── ToolResultTooLarge   the result is longer than the caller's policy allows
    │   ├── ToolDiverged         a resumed run makes another call than before
    │   ├── ToolOutcomeUnknown   the call was started, and its outcome is unknown
    │   └── ToolFailed           the tool was called and did not answer
    ├── RegistryError        the registry of tools cannot be opened, read or written
    └── InternalError        a bug in cellwright

A failure of untrusted code is never an exception: it is a result.
"""

from typing import Any, ClassVar, Literal

__all__ = [
    "ApprovalRequired",
    "AuditError",
    "BudgetExceeded",
    "BuildFailed",
    "BusyError",
    "CellwrightError",
    "ClosedError",
    "InternalError",
    "LaunchError",
    "LauncherLost",
    "ModelError",
    "ModelUnavailable",
    "NodeLost",
    "OutcomeUnknown",
    "PackageError",
    "PackageNotFound",
    "PauseDiffers",
    "PauseError",
    "PolicyError",
    "QuotaExceeded",
    "RegistryError",
    "SessionExpired",
    "SessionLost",
    "SessionNodeLost",
    "SkillError",
    "SkillInvalid",
    "SkillNotFound",
    "SkillUntrusted",
    "ToolArgumentsInvalid",
    "ToolBudgetExceeded",
    "ToolDenied",
    "ToolDiverged",
    "ToolError",
    "ToolExists",
    "ToolFailed",
    "ToolInvalid",
    "ToolNotFound",
    "ToolOutcomeUnknown",
    "ToolQuotaExceeded",
    "ToolResultInvalid",
    "ToolResultTooLarge",
    "ToolTestFailed",
    "Unavailable",
    "Unenforceable",
    "WorkspaceError",
]


class CellwrightError(Exception):
    """The root of the tree; `what` says what failed, `hint` what to do about it.

    A class declares its fields as attributes with defaults, and a keyword argument sets each.  The
    fields cross every wire: a client gets the exception that a local caller would get.

    `kind` is the word that a program in a cell gets if a call of a tool raises the error; `status` and
    `title` are those of an answer over HTTP, and `exit_code` is that of the command.
    """

    __module__ = "cellwright.errors"  # the module repeats every error
    kind = title = "failed"
    status = 500
    exit_code = 70
    fields: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = CellwrightError.__module__
        inherited = (getattr(each, "fields", ()) for each in cls.__bases__)
        cls.fields = frozenset(cls.__annotations__).union(*inherited)

    def __init__(self, message: str, hint: str = "", **fields: Any) -> None:
        if unknown := fields.keys() - self.fields:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        # A message that quotes another exception contains its hint: move it to the end.
        message, *quoted = message.split("\nhint: ")
        hint = hint or (quoted[0] if quoted else "")
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.what = message
        self.hint = hint
        vars(self).update(fields)


class PolicyError(CellwrightError, ValueError):
    """A policy, a configuration or an argument is invalid; the message begins with its name."""

    status = 422
    title = "invalid"
    exit_code = 2


class Unenforceable(CellwrightError):  # noqa: N818 - it reads as a verdict: "unenforceable: ..."
    """This host lacks layers that the policy requires; `gaps` has each layer with the reason."""

    gaps: tuple[tuple[str, str], ...] = ()

    def __init__(self, gaps: tuple[tuple[str, str], ...], hint: str = "") -> None:
        lines = "\n".join(f"  {layer}: {reason}" for layer, reason in gaps)
        super().__init__(f"this host cannot enforce the policy:\n{lines}", hint, gaps=gaps)


class LaunchError(CellwrightError):
    """A cell or its launcher could not be built; the message has the step and the kernel's answer."""


class LauncherLost(LaunchError):  # noqa: N818 - what happened, not a mistake
    """The launcher ended; `cell_began` tells whether the guest may have run."""

    cell_began: bool = False

    def __init__(self, cell_began: bool) -> None:
        while_it_ran = " while the cell ran" if cell_began else ""
        super().__init__(f"the launcher died{while_it_ran}", cell_began=cell_began)


class Unavailable(LaunchError, PolicyError):  # noqa: N818 - it reads as a verdict
    """The caller named an interpreter or an OCI runtime that this host does not have or cannot use."""


class BudgetExceeded(CellwrightError):  # noqa: N818 - it reads as a verdict
    """The host stopped work on untrusted input because its budget was used up.

    `cause` tells why: too many steps, too much time, or the caller cancelled.
    """

    kind = "budget"
    cause: Literal["steps", "wall_time", "cancelled"] = "steps"


class BusyError(CellwrightError):
    """No slot is free for another execution now; try again later."""

    status = 429
    title = "busy"


class QuotaExceeded(BusyError):  # noqa: N818 - it reads as a verdict
    """A client, or a tenant of a daemon, uses as much as it may; `limit` names the quota."""

    limit: str = ""


class AuditError(CellwrightError):
    """The audit trail cannot be opened or written."""


class ClosedError(CellwrightError):
    """The sandbox was closed."""

    status = 503
    title = "closing"


class SessionLost(CellwrightError):  # noqa: N818 - what happened, not a mistake
    """The cell of a session ended, and its state is lost; the message says why."""

    status = 404
    title = "session_lost"


class SessionExpired(SessionLost):
    """A session was ended by a setting; `limit` is its name: idle_seconds or lifetime_seconds."""

    limit: str = ""


class BuildFailed(CellwrightError):  # noqa: N818 - what happened, not a mistake
    """A RUN of a Dockerfile failed, in `line`, with the exit status `exited`; `output` is its end."""

    status = 422
    title = "build"
    exit_code = 1
    line: int = 0
    exited: int = 0
    output: str = ""


class NodeLost(CellwrightError):  # noqa: N818 - what happened, not a mistake
    """A node of a fleet was lost; `node` is its name, empty if it was every node."""

    node: str = ""


class OutcomeUnknown(NodeLost):
    """A call may have begun on a node that was lost: it is not repeated, and its outcome is unknown."""


class SessionNodeLost(NodeLost, SessionLost):
    """The node of a session was lost, and the session with it."""


class PauseError(CellwrightError):
    """A session cannot be paused, or a paused one cannot be resumed; `is_final`: never, here."""

    status = 409
    title = "pause"
    is_final: bool = False


class PauseDiffers(PauseError):  # noqa: N818 - what happened, not a mistake
    """A paused session needs something that has changed; `differs` names it."""

    differs: tuple[str, ...] = ()
    is_final: bool = True


class WorkspaceError(CellwrightError):
    """A file of a session, or a named workspace, cannot be read or written."""

    status = 422
    title = "file"


class PackageError(CellwrightError):
    """Packages cannot be resolved, fetched, opened or kept."""

    status = 422
    title = "packages"


class PackageNotFound(PackageError, PolicyError):  # noqa: N818
    """The caller named a set of packages or a file that is not there, or the extra is missing."""

    title = PolicyError.title


class SkillError(CellwrightError):
    """A skill cannot be read, kept or used."""


class SkillInvalid(SkillError):  # noqa: N818 - it reads as a verdict
    """The files of a skill, or its SKILL.md, are invalid; `result` is that of a failed replay."""

    result: Any = None


class SkillNotFound(SkillError):  # noqa: N818
    """No skill has that name."""

    kind = title = "not_found"
    status = 404


class SkillUntrusted(SkillError):  # noqa: N818
    """Nobody trusted a skill with these files."""

    kind = "denied"


class ModelError(CellwrightError):
    """The server of a model refuses a request, or its answer is not of the protocol."""

    status = 502
    title = "model"


class ModelUnavailable(ModelError):  # noqa: N818 - what happened, not a mistake
    """The server of a model does not answer now; the run of an agent can be resumed when it does."""


class ToolError(CellwrightError):
    """An error of a tool or of a call of it; `tool` is the tool's name."""

    status = 422
    title = "tool"
    tool: str = ""


class ToolNotFound(ToolError):  # noqa: N818 - like all of these, what happened
    """No tool has that name."""

    kind = title = "not_found"
    status = 404


class ToolInvalid(ToolError, ValueError):  # noqa: N818
    """The name, the source or a schema of a tool is invalid."""


class ToolTestFailed(ToolInvalid):
    """A tool's own tests failed; `result` is the result of the cell that ran them."""

    result: Any = None


class ToolExists(ToolError):  # noqa: N818
    """The name is in use, or another tool does the same; `existing` is the name of that tool."""

    existing: str = ""


class ToolDenied(ToolError):  # noqa: N818
    """The caller may not make the call."""

    kind = title = "denied"
    status = 403


class ToolBudgetExceeded(ToolError):  # noqa: N818
    """The caller made too many calls, or too fast; `times` counts them, including this one."""

    kind = "budget"
    status = 429
    title = "too_fast"
    times: int = 0


class ApprovalRequired(ToolDenied):
    """The call needs the approval of a person."""

    kind = "not_approved"
    title = "approval_required"


class ToolQuotaExceeded(ToolError):  # noqa: N818
    """The tools of one maker would exceed its quota of bytes or versions."""

    kind = "quota"


class ToolArgumentsInvalid(ToolError, ValueError):  # noqa: N818
    """The arguments do not match the tool's schema."""

    kind = "invalid_arguments"


class ToolResultInvalid(ToolError):  # noqa: N818
    """The result does not match the tool's schema."""

    kind = "invalid_result"


class ToolResultTooLarge(ToolError):  # noqa: N818
    """The result is longer than `tools.result_bytes`; `result_id`, if not empty, identifies it for the
    tools results.read_all and results.read."""

    kind = "too_large"

    result_id: str = ""


class ToolDiverged(ToolError):  # noqa: N818
    """A resumed run makes another call than it made at that place before."""

    kind = "diverged"


class ToolOutcomeUnknown(ToolError):  # noqa: N818
    """The call was started and its outcome is unknown; a retry could perform it twice."""

    kind = "unknown"


class ToolFailed(ToolError):  # noqa: N818
    """A tool was called and did not answer; `result` is the result of its cell, if it ran in one."""

    result: Any = None


class RegistryError(CellwrightError):
    """The registry of tools cannot be opened, read or written."""


class InternalError(CellwrightError):
    """A bug in cellwright."""

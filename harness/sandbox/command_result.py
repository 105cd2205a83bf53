"""`CommandResult`: the outcome of a command that `run` executed."""

import msgspec

from ...runner.result import Usage, Violation


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a command.

    exit_code: its own; 128 and the number of the signal that killed it; 127 if there is no such
        program, 126 if it cannot be executed, 124 if it took too long, 137 if its cell was killed
    stdout, stderr: its output as text; bytes that are not UTF-8 are U+FFFD
    timed_out: it took longer than `timeout`, or than the policy allows
    error: why it did not end by itself; None if it did
    usage, violations, truncated, notices, hints, execution_id: those of the SandboxResult
    """

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    error: str | None = None
    usage: Usage = Usage()
    violations: tuple[Violation, ...] = ()
    truncated: dict[str, int] = {}
    notices: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    execution_id: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.exit_code == 0

    def for_model(self) -> "CommandResult":
        """Return what a model may see, as `SandboxResult.for_model` does."""
        return self

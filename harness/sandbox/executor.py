"""`CodeExecutor`: runs code under permissions, in a backend, with a trail."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...policies.closing import Closing
from ...policies.permissions import PermissionSet
from ...policies.source.check import validate_code
from ...runner.audit.level import AuditLevel
from ...runner.audit.log import AuditLog
from ...runner.result import SandboxResult, SandboxStatus
from .checks import suggests_fields
from .isolation import IsolationBackend, IsolationConfig, ProcessIsolation


@suggests_fields
@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """The language and limits of one execution, and data of the caller."""

    id: str = ""
    language: str = "python"
    timeout: float = 30.0
    max_memory_mb: float = 256
    env_vars: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecutionResult:
    """The outcome of one execution; `result` has all of it."""

    success: bool
    output: str
    error: str | None
    exit_code: int | None
    execution_time: float
    context: ExecutionContext
    result: SandboxResult

    @property
    def status(self) -> SandboxStatus:
        return self.result.status

    @property
    def stdout(self) -> str:
        return self.result.stdout

    @property
    def stderr(self) -> str:
        return self.result.stderr


class CodeExecutor(Closing):
    """Runs code under `permissions`, in `backend`, with a record in `audit`.

    Only ProcessIsolation enforces permissions; with another backend they must be empty.  A context
    manager: `close`, or garbage collection, frees the cells kept between executions.
    """

    def __init__(
        self,
        permissions: PermissionSet | None = None,
        backend: IsolationBackend | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """Raise PolicyError if the permissions are invalid, or the backend cannot enforce them."""
        self.backend = (backend or ProcessIsolation()).under(permissions or PermissionSet(), audit)
        self.audit = audit

    def validate_code(self, code: str, language: str = "python") -> dict[str, Any]:
        """Return {"valid": ..., "issues": [{"pattern", "reason", "line"}]}.

        The code is not executed.  This is advice: the kernel is the boundary.
        """
        return validate_code(code, language)

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Run `code` and return its outcome; raises what the backend raises."""
        context = context or ExecutionContext()
        began = time.monotonic()
        result = self.backend.execute(code, context.language, _limits_of(context))
        if not self.backend.keeps_trail:
            self._record(result, context)
        seconds = time.monotonic() - began
        return ExecutionResult(
            success=result.ok, output=result.stdout, error=result.error or result.stderr or None,
            exit_code=result.exit_code, execution_time=seconds, context=context, result=result,
        )  # fmt: skip

    def close(self) -> None:
        self.backend.close()

    def _record(self, result: SandboxResult, context: ExecutionContext) -> None:
        if self.audit:
            level = AuditLevel.INFO if result.ok else AuditLevel.WARNING
            self.audit.record(
                "execution", result.status.value, level=level, target=context.language,
                reason=result.reason, exit_code=result.exit_code, context_id=context.id,
            )  # fmt: skip


def _limits_of(context: ExecutionContext) -> IsolationConfig:
    return IsolationConfig(
        timeout_seconds=context.timeout,
        max_memory_mb=context.max_memory_mb,
        env_vars=context.env_vars,
        trace_id=context.id or None,
    )

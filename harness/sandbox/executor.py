"""The code executor: permissions, a backend and a trail, put together."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...policies.closing import Closing
from ...policies.permissions import PermissionSet
from ...policies.source.check import validate_code
from ...runner.audit.level import AuditLevel
from ...runner.audit.log import AuditLog
from ...runner.result import SandboxResult
from .isolation import IsolationBackend, IsolationConfig, ProcessIsolation


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """What one execution is for, and within which bounds."""

    id: str = ""
    language: str = "python"
    timeout: float = 30.0
    max_memory_mb: float = 256
    env_vars: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecutionResult:
    """What came of it; `result` has the whole of it."""

    success: bool
    output: str
    error: str | None
    exit_code: int | None
    execution_time: float
    context: ExecutionContext
    result: SandboxResult


class CodeExecutor(Closing):
    """Runs code under `permissions`, in `backend`, with a record in `audit`.

    Permissions are enforced by our cells alone: with another backend they must be empty.  A context
    manager; what is kept between executions is freed by `close`, or once nobody refers to it.
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
        """Return {"valid": ..., "issues": [{"pattern", "reason", "line"}]}; nothing runs.  Advice."""
        return validate_code(code, language)

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Run `code` and return what came of it; raises what the backend raises."""
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

"""The code executor: permissions, a backend and a trail, put together."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ..policies.errors import PolicyError
from ..policies.permissions import PermissionSet
from ..policies.policy import MIB
from ..policies.source.check import validate_code
from ..runner.audit.level import AuditLevel
from ..runner.audit.log import AuditLog
from ..runner.result import SandboxResult
from .isolation import IsolationBackend, IsolationConfig, ProcessIsolation
from .permissions import policy_of
from .sandbox import Sandbox


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


class CodeExecutor:
    """Runs code under `permissions`, in `backend`, with a record in `audit`.

    Permissions are enforced by our cells alone: with another backend they must be empty.
    """

    def __init__(
        self,
        permissions: PermissionSet | None = None,
        backend: IsolationBackend | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """Raise PolicyError if the permissions make no sense, or the backend cannot enforce them."""
        self.backend = backend or ProcessIsolation()
        self.audit = audit
        if (
            permissions
            and permissions.permissions
            and not isinstance(self.backend, ProcessIsolation)
        ):
            raise PolicyError(
                "permissions: only ProcessIsolation enforces them", "use it, or give no permissions"
            )
        self._policy = policy_of(permissions or PermissionSet())

    def validate_code(self, code: str, language: str = "python") -> dict[str, Any]:
        """Return {"valid": ..., "issues": [{"pattern", "reason", "line"}]}; nothing runs.  Advice."""
        return validate_code(code, language)

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Run `code` and return what came of it; raises what the backend raises."""
        context = context or ExecutionContext()
        began = time.monotonic()
        if isinstance(self.backend, ProcessIsolation):
            result = self._in_a_cell(code, context)
        else:
            result = self.backend.execute(code, context.language, _limits_of(context))
            self._record(result, context)
        seconds = time.monotonic() - began
        return ExecutionResult(
            success=result.ok, output=result.stdout, error=result.error or result.stderr or None,
            exit_code=result.exit_code, execution_time=seconds, context=context, result=result,
        )  # fmt: skip

    def _in_a_cell(self, code: str, context: ExecutionContext) -> SandboxResult:
        memory = int(context.max_memory_mb * MIB)
        limits = replace(self._policy.limits, memory_bytes=memory, wall_seconds=context.timeout)
        policy = replace(self._policy, limits=limits)
        with Sandbox(policy=policy, pool=0, audit=self.audit) as sandbox:
            return sandbox.execute(
                code, context.language, env=dict(context.env_vars), trace_id=context.id or None
            )

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
    )

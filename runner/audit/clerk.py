"""What a sandbox writes into the trail, and when."""

import hashlib
import os

from ...policies.plan import Plan
from ..result import SandboxResult, SandboxStatus
from .level import AuditLevel
from .log import AuditLog
from .spans import Span, span_of

_TERMINAL = {
    SandboxStatus.COMPLETED: "ok",
    SandboxStatus.FAILED: "error",
    SandboxStatus.TIMEOUT: "timeout",
    SandboxStatus.KILLED: "killed",
    SandboxStatus.CANCELLED: "cancelled",
    SandboxStatus.REJECTED: "rejected",
}


class Clerk:
    """Writes the records of one sandbox; a record before a program runs, one when it has ended.

    Of a program its hash and length are recorded, never its text, which may hold secrets.
    """

    def __init__(self, log: AuditLog, plan: Plan) -> None:
        self.log = log
        self.sandbox_id = os.urandom(8).hex()
        self.log.record(
            "policy", "compiled", target=plan.policy, sandbox_id=self.sandbox_id,
            layers=list(plan.layers), filter_sha256=hashlib.sha256(plan.guest_filter).hexdigest(),
        )  # fmt: skip

    def begin(self, code: str, language: str, execution_id: str, trace_id: str | None) -> Span:
        """Record that a program is about to run; raises AuditError if that must be and cannot."""
        span = span_of(trace_id)
        source = code.encode()
        self.log.record(
            "execution", "start", target=language, sandbox_id=self.sandbox_id, span=span,
            execution_id=execution_id, source_sha256=hashlib.sha256(source).hexdigest(),
            source_bytes=len(source),
        )  # fmt: skip
        return span

    def end(self, result: SandboxResult, span: Span) -> bool:
        """Record how it ended and what it attempted; tell whether all of it was kept."""
        kept = [self._note_violation(result, span, n) for n in range(len(result.violations))]
        terminal = "oom" if result.reason == "memory" else _TERMINAL[result.status]
        kept.append(
            self.log.record(
                "execution", terminal, sandbox_id=self.sandbox_id, span=span,
                level=AuditLevel.INFO if result.ok else AuditLevel.WARNING,
                execution_id=result.execution_id, reason=result.reason,
                exit_code=result.exit_code, signal=result.signal,
                wall_seconds=round(result.execution_time, 6),
                memory_peak_bytes=result.usage.memory_peak_bytes,
                output_bytes=result.usage.output_bytes,
            )
        )  # fmt: skip
        return all(kept)

    def lose(self, execution_id: str, span: Span, why: BaseException) -> None:
        """Record that what came of a program is not known."""
        self.log.record(
            "execution", "lost", target=str(why), sandbox_id=self.sandbox_id, span=span,
            level=AuditLevel.ERROR, execution_id=execution_id,
        )  # fmt: skip

    def refuse(self, why: str, execution_id: str, trace_id: str | None) -> Span:
        """Record that a request was refused before anything ran."""
        span = span_of(trace_id)
        self.log.record(
            "validation", "refused", target=why, allowed=False, level=AuditLevel.WARNING,
            sandbox_id=self.sandbox_id, span=span, execution_id=execution_id,
        )  # fmt: skip
        return span

    def _note_violation(self, result: SandboxResult, span: Span, number: int) -> bool:
        violation = result.violations[number]
        return self.log.record(
            "violation", violation.syscall, target=" ".join(violation.arguments), allowed=False,
            level=AuditLevel.WARNING, sandbox_id=self.sandbox_id, span=span.child(),
            rule=violation.rule, process=violation.process, count=violation.count,
            execution_id=result.execution_id,
        )  # fmt: skip

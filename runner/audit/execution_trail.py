"""The records that a sandbox writes into the trail, and when it writes them."""

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import msgspec

from ...policies.plan import Plan
from ..cells.workspace import KeptWorkspace
from ..requests.result import NetworkConnection, SandboxResult, SandboxStatus, Violation
from ..settings import AuditLevel
from .log import AuditLog
from .record import Span, span_of

_TERMINAL = {
    SandboxStatus.COMPLETED: "ok",
    SandboxStatus.FAILED: "error",
    SandboxStatus.TIMEOUT: "timeout",
    SandboxStatus.KILLED: "killed",
    SandboxStatus.CANCELLED: "cancelled",
    SandboxStatus.REJECTED: "rejected",
}


class RecordPlace(msgspec.Struct, frozen=True):
    """The place of a record in the trail, and whether the trail kept it."""

    span: Span
    kept: bool


class ExecutionTrail:
    """Writes the records of one sandbox: one before a program runs, one after its end.

    A record holds a program's hash and length, never its text, which may hold secrets.  Once a
    program has begun, no method raises AuditError: the record of its end is owed to the trail.
    """

    def __init__(self, log: AuditLog, plan: Plan) -> None:
        self.log = log
        self.sandbox_id = os.urandom(8).hex()
        self.log.record(
            "policy", "compiled", target=plan.policy, sandbox_id=self.sandbox_id,
            layers=list(plan.layers), filter_sha256=hashlib.sha256(plan.guest_filter).hexdigest(),
        )  # fmt: skip

    def begin(
        self, code: str, language: str, execution_id: str, trace_id: str | None, **about: Any
    ) -> RecordPlace:
        """Record that a program is about to run; raises AuditError if the log is required and
        cannot be written."""
        span = span_of(trace_id)
        source = code.encode()
        kept = self.log.record(
            "execution", "start", target=language, sandbox_id=self.sandbox_id, span=span,
            execution_id=execution_id, source_sha256=hashlib.sha256(source).hexdigest(),
            source_bytes=len(source), **about,
        )  # fmt: skip
        return RecordPlace(span, kept)

    def note_session(self, session_id: str, action: str, why: str) -> None:
        """Record that a session opened or how it ended; the record is owed."""
        self.log.record(
            "session", action, target=why, sandbox_id=self.sandbox_id, session_id=session_id,
            owed=action != "opened",
        )  # fmt: skip

    def note_network(
        self, session_id: str, refused: Iterable[Violation],
        connections: Iterable[NetworkConnection],
    ) -> None:  # fmt: skip
        """Record a session's use of the network since its last request; the records are owed."""
        for violation in refused:
            self._note_violation(violation, session_id=session_id, owed=True)
        for connection in connections:
            self._note_connection(connection, session_id=session_id, owed=True)

    def note_rule(self, action: str, rule: str, *, owed: bool, **about: Any) -> None:
        """Record that a network rule was added to the sandbox; raises AuditError unless it is owed."""
        self.log.record(
            "network", action, target=rule, sandbox_id=self.sandbox_id, owed=owed, **about
        )

    def note_workspace(self, kept: KeptWorkspace, **about: Any) -> None:
        """Record the state of a named workspace after a call or session; the record is owed."""
        refused = kept.state == "refused"
        self.log.record(
            "file", kept.state, target=kept.name, allowed=not refused, sandbox_id=self.sandbox_id,
            level=AuditLevel.WARNING if refused else AuditLevel.INFO, owed=True, why=kept.why,
            size_bytes=kept.size_bytes, files=kept.files, **about,
        )  # fmt: skip

    def end(self, result: SandboxResult, begun: RecordPlace, *, in_session: bool = False) -> bool:
        """Record how a program ended, its refused attempts and its connections; return whether all
        of its records were kept."""
        kept = begun.kept
        try:
            if result.violations or result.connections:
                kept &= self._note_attempts(result, begun)
        finally:  # a callback may raise; there is an end for every start
            kept &= self._note_end(result, begun, in_session=in_session)
        return kept

    def _note_attempts(self, result: SandboxResult, begun: RecordPlace) -> bool:
        about = {"owed": begun.kept, "execution_id": result.execution_id}
        kept = [
            self._note_violation(each, span=begun.span.child(), **about)
            for each in result.violations
        ]
        kept += [
            self._note_connection(each, span=begun.span.child(), **about)
            for each in result.connections
        ]
        return all(kept)

    def lose(self, execution_id: str, begun: RecordPlace, why: BaseException) -> None:
        """Record that the outcome of a program is unknown."""
        self.log.record(
            "execution", "lost", target=str(why), sandbox_id=self.sandbox_id, span=begun.span,
            level=AuditLevel.ERROR, owed=begun.kept, execution_id=execution_id,
        )  # fmt: skip

    def refuse(self, why: str, execution_id: str, trace_id: str | None) -> RecordPlace:
        """Record that a request was refused before anything ran."""
        span = span_of(trace_id)
        kept = self.log.record(
            "validation", "refused", target=why, allowed=False, level=AuditLevel.WARNING,
            sandbox_id=self.sandbox_id, span=span, execution_id=execution_id,
        )  # fmt: skip
        return RecordPlace(span, kept)

    def _note_end(self, result: SandboxResult, begun: RecordPlace, *, in_session: bool) -> bool:
        terminal = "oom" if result.reason == "memory" else _TERMINAL[result.status]
        usage, phases = result.usage, result.phases
        pool: dict[str, Any] = (
            {} if in_session else {"pool_hit": result.pool_hit}
        )  # a session has its cell
        if result.evaluator:  # no cell was made
            pool = {"evaluator": result.evaluator}
        if phases.resume:
            pool["resume_seconds"] = round(phases.resume, 6)
        return self.log.record(
            "execution", terminal, sandbox_id=self.sandbox_id, span=begun.span, owed=begun.kept,
            level=AuditLevel.INFO if terminal == "ok" else AuditLevel.WARNING,
            execution_id=result.execution_id, reason=result.reason,
            exit_code=result.exit_code, signal=result.signal,
            wall_seconds=round(result.execution_time, 6),
            memory_peak_bytes=usage.memory_peak_bytes,
            output_bytes=usage.output_bytes,
            cpu_seconds=round(usage.cpu_user_seconds + usage.cpu_system_seconds, 6),
            lease_seconds=round(phases.lease, 6), send_seconds=round(phases.send, 6),
            run_seconds=round(phases.run, 6), reply_seconds=round(phases.reply, 6),
            teardown_seconds=round(phases.teardown, 6), **pool,
        )  # fmt: skip

    def _note_connection(self, connection: NetworkConnection, **about: Any) -> bool:
        return self.log.record(
            "network", "connection", target=f"{connection.name}:{connection.port}",
            level=AuditLevel.INFO, sandbox_id=self.sandbox_id,
            address=connection.address, rule=connection.rule,
            outcome=connection.outcome, sent_bytes=connection.sent_bytes,
            received_bytes=connection.received_bytes, seconds=round(connection.seconds, 6),
            **about,
        )  # fmt: skip

    def _note_violation(self, violation: Violation, **about: Any) -> bool:
        return self.log.record(
            "violation", violation.syscall, target=" ".join(violation.arguments), allowed=False,
            level=AuditLevel.WARNING, sandbox_id=self.sandbox_id,
            rule=violation.rule, process=violation.process, count=violation.count,
            **about,
        )  # fmt: skip

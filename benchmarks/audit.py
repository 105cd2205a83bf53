"""The cost of the audit trail: appending the two records of an execution, and verifying a file."""

import os
import time
from pathlib import Path
from typing import Any

from ..runner.audit.file import Durability
from ..runner.audit.log import AuditLog
from ..runner.audit.record import Span, span_of
from ..runner.audit.verification import verify
from .measuring import quartile_columns, quartiles
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings

_SANDBOX = "0" * 16
_BATCH = 256
_EXECUTION: dict[str, Any] = {
    "target": "python",
    "execution_id": "0" * 32,
    "source_sha256": "1" * 64,
    "source_bytes": 100,
}
_ENDED: dict[str, Any] = {
    "reason": "exit",
    "exit_code": 0,
    "wall_seconds": 0.001,
    "memory_peak_bytes": 4_000_000,
}
_US = 1e6
_WAYS: tuple[tuple[str, str, Durability], ...] = (
    ("in memory", "", "none"),
    ("file, durability none", "none", "none"),
    ("file, durability batched", "batched", "batched"),
    ("file, durability every", "every", "every"),
)


def measure(settings: Settings) -> Report:
    """Return microseconds an execution for each durability, and how quickly a trail is verified."""
    executions = settings.amount(25_000, 4 * _BATCH)
    with scratch_directory() as directory:
        rows = [
            _row(title, Path(directory, name) if name else None, durability, executions)
            for title, name, durability in _WAYS
        ]
        began = time.perf_counter()
        verdict = verify(Path(directory, "none"))
        rate = verdict.records / (time.perf_counter() - began)
        size = os.path.getsize(Path(directory, "none")) / max(1, verdict.records)
    costs = ReportTable(
        title="Two records of an execution, microseconds",
        columns=(Column("where"), *quartile_columns("us", 1)),
        rows=tuple(rows),
        note=f"Quartiles over batches of {_BATCH}, so that a batched flush is in each.",
    )
    verifying = ReportTable(
        title="Verifying",
        columns=(Column("records a second", 0), Column("bytes a record", 0)),
        rows=((rate, size),),
    )
    intact = Criterion("the trail verifies", verdict.ok, f"{verdict.records} records")
    return Report(
        name="audit",
        title="What the audit trail costs",
        tables=(costs, verifying),
        verdicts=(intact,),
    )


def _row(
    title: str, path: Path | None, durability: Durability, executions: int
) -> tuple[Value, ...]:
    batches = executions // _BATCH if durability != "every" else min(4, executions // _BATCH)
    span = span_of(None)
    with AuditLog(path=path, durability=durability) as log:
        costs = [_batch(log, span) for _ in range(max(1, batches))]
    return (title, *quartiles(costs, _US))


def _batch(log: AuditLog, span: Span) -> float:
    began = time.perf_counter()
    for _ in range(_BATCH):
        log.record("execution", "start", sandbox_id=_SANDBOX, span=span, **_EXECUTION)
        log.record("execution", "ok", sandbox_id=_SANDBOX, span=span, owed=True, **_ENDED)
    return (time.perf_counter() - began) / _BATCH

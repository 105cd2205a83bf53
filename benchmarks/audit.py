"""What the audit trail costs: appending the two records of an execution, and verifying.

python benchmarks/audit.py [--records N]
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from cellwright import AuditLog, verify
from cellwright.runner.audit.file import Durability
from cellwright.runner.audit.spans import Span, span_of

SANDBOX = "0" * 16
BATCH = 256
EXECUTION = {
    "target": "python",
    "execution_id": "0" * 32,
    "source_sha256": "1" * 64,
    "source_bytes": 100,
}
ENDED = {"reason": "exit", "exit_code": 0, "wall_seconds": 0.001, "memory_peak_bytes": 4_000_000}


def append_microseconds(path: Path | None, durability: Durability, executions: int) -> float:
    """Return the time of one execution's two records: the median over batches of them."""
    span = span_of(None)
    with AuditLog(path=path, durability=durability) as log:
        return statistics.median(batch(log, span) for _ in range(executions // BATCH)) * 1e6


def batch(log: AuditLog, span: Span) -> float:
    """Return the mean of some executions, enough of them to include a flush of `batched`."""
    began = time.perf_counter()
    for _ in range(BATCH):
        log.record("execution", "start", sandbox_id=SANDBOX, span=span, **EXECUTION)
        log.record("execution", "ok", sandbox_id=SANDBOX, span=span, owed=True, **ENDED)
    return (time.perf_counter() - began) / BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    executions = parser.parse_args().records // 2
    with tempfile.TemporaryDirectory() as directory:
        print(
            f"in memory       {append_microseconds(None, 'none', executions):7.1f} us an execution"
        )
        trail = Path(directory, "trail")
        cost = append_microseconds(trail, "none", executions)
        print(f"file, none      {cost:7.1f} us")
        cost = append_microseconds(Path(directory, "b"), "batched", executions)
        print(f"file, batched   {cost:7.1f} us")
        cost = append_microseconds(Path(directory, "e"), "every", min(executions, 4 * BATCH))
        print(f"file, every     {cost:7.1f} us")
        began = time.perf_counter()
        verdict = verify(trail)
        rate = verdict.records / (time.perf_counter() - began)
        size = os.path.getsize(trail) / verdict.records
        print(f"verify          {rate:7.0f} records a second, {size:.0f} bytes each")


if __name__ == "__main__":
    main()

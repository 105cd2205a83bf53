"""`run_batch`: runs or judges the rows of a batch, and writes each result as it comes."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...policies.errors import CellwrightError, PolicyError
from ...runner.requests.result import CompileResult
from ..sandbox.calls.background import mapped, width_of
from ..sandbox.judging.verdicts import JudgeLimits
from ..sandbox.sandbox import Sandbox
from .result_file import ResultFile, RowResult, shortened
from .rows import BatchRow


class BatchProgress(NamedTuple):
    """How far a batch is: rows that have ended, of all; `failed` of them did not pass."""

    done: int
    total: int
    failed: int
    rows_per_second: float

    def __str__(self) -> str:
        rate = f"{self.rows_per_second:.1f} a second"
        text = f"{self.done:,} of {self.total:,}, {self.failed:,} failed, {rate}"
        if self.rows_per_second and self.done < self.total:
            left = round((self.total - self.done) / self.rows_per_second)
            text += f", {left // 60}:{left % 60:02} left"
        return text


def run_batch(
    sandbox: Sandbox, rows: Iterable[BatchRow], results: ResultFile, total: int, *,
    language: str | None, limits: JudgeLimits, at_once: int | None = None,
    on_progress: Callable[[BatchProgress], None] | None = None,
) -> None:  # fmt: skip
    """Run the rows that have no result yet; `total` is the number of all.

    Raises PolicyError for invalid rows, and what makes every row fail, such as LaunchError.
    """
    had = len(results.done)
    failed = sum(not each.passed for each in results.done.values())
    began = time.monotonic()
    todo = (row for row in rows if not results.is_done(row))
    ended: Iterator[RowResult | CellwrightError] = mapped(
        lambda row: result_of(sandbox, row, language, limits), todo, width_of(at_once),
        return_errors=False, ordered=False,
    )  # fmt: skip
    for number, result in enumerate(ended, 1):
        if isinstance(result, CellwrightError):
            raise result
        results.add(result)
        failed += not result.passed
        if on_progress:
            rate = number / max(time.monotonic() - began, 1e-9)
            on_progress(BatchProgress(had + number, total, failed, rate))


def result_of(
    sandbox: Sandbox, row: BatchRow, language: str | None, limits: JudgeLimits, *,
    every: bool = False,
) -> RowResult:  # fmt: skip
    """Return how a row ended; one that `execute` refuses to take has failed, and the rest goes on.

    `every`: judge all cases, not only up to the first that fails.
    """
    try:
        return _ran(sandbox, row, language, limits, every=every)
    except PolicyError as error:
        return RowResult(
            line=row.line, task=row.task, digest=row.digest, passed=False, outcome="invalid",
            error=str(error),
        )  # fmt: skip


def _ran(
    sandbox: Sandbox, row: BatchRow, language: str | None, limits: JudgeLimits, *, every: bool
) -> RowResult:
    named = row.language or language
    if row.cases is not None:
        taken = ("flags", "compile_timeout")
        options = {name: row.options[name] for name in taken if name in row.options}
        done = sandbox.judge(
            row.code, named, row.cases, checker=row.checker or "tokens", limits=limits, all=every,
            **options,
        )  # fmt: skip
        failed = next((each for each in done.cases if each.verdict is done.verdict), None)
        return RowResult(
            line=row.line, task=row.task, digest=row.digest, passed=done.ok,
            outcome=done.verdict.value, score=done.score, seconds=done.seconds,
            wall_seconds=sum(each.wall_seconds for each in done.cases),
            memory_bytes=done.memory_bytes, error=shortened(done.message),
            stdout=shortened(failed.stdout) if failed else "",
            stderr=shortened(failed.stderr if failed else _compiler_words(done.compile)),
            cases=tuple(each.verdict.value for each in done.cases),
        )  # fmt: skip
    ran = sandbox.execute(row.code, named, **row.options)
    usage, passed = ran.usage, ran.ok and (not row.proof or ran.value == row.proof)
    return RowResult(
        line=row.line, task=row.task, digest=row.digest, passed=passed,
        outcome=ran.reason if passed or not ran.ok else "ended before its tests",
        score=float(passed), seconds=usage.cpu_user_seconds + usage.cpu_system_seconds,
        wall_seconds=usage.wall_seconds, memory_bytes=usage.memory_peak_bytes,
        exit_code=ran.exit_code, error=shortened(ran.error or ""), stdout=shortened(ran.stdout),
        stderr=shortened(ran.stderr),
    )  # fmt: skip


def _compiler_words(compiled: CompileResult | None) -> str:
    return compiled.output if compiled else ""

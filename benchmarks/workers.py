"""One sandbox, one in each of N processes, and one with N workers: calls a second, side by side.

A process that watches cells is Python, of which one thread runs at a time.  Several processes with a
sandbox each show what the machine gives without that limit; `Sandbox(workers=N)` has to come near,
while its own process spends little on a call.
"""

import os
from contextlib import ExitStack

from .measuring import median
from .parallel import ServedSandbox, ServingProcess, Together, Turn, together
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings

_LEAST_SHARE = 0.95  # of the calls a second of N processes
_MOST_CPU = 0.4  # of what the process of one sandbox spends on a call
_GOAL_MS = 0.15
_ONE, _MANY, _WORKERS = "one sandbox", "one in each of {} processes", "one with {} workers"


def measure(settings: Settings) -> Report:
    """Return rates by callers and contender, which take turns."""
    seconds = 0.3 if settings.smoke else 3.0
    counts = (2,) if settings.smoke else tuple(n for n in (2, 4, 8, 16) if n <= _most())
    found: dict[tuple[int, str], list[Together]] = {}
    for count in counts:
        with ExitStack() as stack:

            def started(workers: int = 1, stack: ExitStack = stack) -> ServingProcess:
                served = ServedSandbox(settings.policy, workers)
                return stack.enter_context(ServingProcess(served))

            contenders = {
                _ONE: [started()],
                _MANY.format(count): [started() for _ in range(count)],
                _WORKERS.format(count): [started(count)],
            }
            _take_turns(contenders, 4 * count, seconds, settings.amount(7, 1), found)
    return _report(found)


def _most() -> int:
    return max(2, len(os.sched_getaffinity(0)))


def _take_turns(
    contenders: dict[str, list[ServingProcess]], callers: int, seconds: float, rounds: int,
    found: dict[tuple[int, str], list[Together]],
) -> None:  # fmt: skip
    """Have each contender take a turn in each round, in alternating order, after one that warms up."""
    for number in range(rounds + 1):
        order = list(contenders.items())
        for name, processes in order if number % 2 else reversed(order):
            took = together(processes, Turn(callers // len(processes), seconds))
            if number:
                found.setdefault((callers, name), []).append(took)


def _report(found: dict[tuple[int, str], list[Together]]) -> Report:
    table = ReportTable(
        title="`1+1` in a fresh cell: calls a second, and CPU time a call of the calling process",
        columns=(
            Column("callers", 0), Column("sandbox", 0), Column("calls/s", 0),
            Column("calling process ms"),
        ),
        rows=tuple(_row(*key, turns) for key, turns in found.items()),
        note=f"Medians over turns; {os.cpu_count()} processors.",
    )  # fmt: skip
    shares = [
        _rate(turns) / _rate(found[callers, name.replace("one with", "one in each of")
                                   .replace("workers", "processes")])
        for (callers, name), turns in found.items() if "workers" in name
    ]  # fmt: skip
    spent = [
        _spent(turns) / _spent(found[callers, _ONE])
        for (callers, name), turns in found.items() if "workers" in name
    ]  # fmt: skip
    return Report(
        name="workers",
        title="A sandbox with workers, beside several processes",
        tables=(table,),
        verdicts=(
            Criterion(
                f"a sandbox with workers does {_LEAST_SHARE:.0%} of the calls of as many processes",
                min(shares) >= _LEAST_SHARE, f"at least {min(shares):.0%}",
            ),
            Criterion(
                f"its own process spends {_MOST_CPU:.0%} of that of one sandbox on a call",
                max(spent) <= _MOST_CPU, f"at most {max(spent):.0%}",
            ),
        ),
        notes=(
            "Callers are threads, shared evenly among the processes.",
            f"The goal on a quiet machine: {_GOAL_MS} ms of CPU time of its own process a call.",
        ),
    )  # fmt: skip


def _row(callers: int, name: str, turns: list[Together]) -> tuple[Value, ...]:
    return callers, name, _rate(turns), _spent(turns)


def _rate(turns: list[Together]) -> float:
    return median([each.rate for each in turns])


def _spent(turns: list[Together]) -> float:
    return median([each.cpu_ms()[0] for each in turns])

"""The cost of each layer on this host, added one by one from a bare fork up to a whole call.

The stages are measured by `stages.py` in a launcher of their own.  What the supervisor does besides,
cgroups, channels, the program and its audit records, is measured here, through the public API.
"""

from functools import partial
from typing import NamedTuple

from .calls import cost_of_calls
from .ladder_launcher import LadderLauncher, ladder_launcher
from .ladder_messages import AHEAD, FORK, StageTimes, TimesByStage
from .measuring import (
    Contender,
    median,
    percentile,
    quartile_bar,
    quartile_columns,
    quartiles,
    side_by_side,
)
from .programs import SUM
from .report import Bar, Bars, Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_US = 1e6
_CGROUP = "cgroup made, read, removed"
_REST = "interpreter, channels, result"
_AUDIT = "audit"
_DEMAND, _QUIET, _READY = "on demand, audited", "on demand, no audit", "a cell stood ready, audited"


def measure(settings: Settings) -> Report:
    """Return the stages, namespaces singly, the supervisor's part, and system calls in a cell."""
    rounds = settings.amount(150, 15)
    with ladder_launcher(settings.policy) as launcher:
        stages = launcher.measure(rounds)
        supervisor = _supervisors_part(settings, launcher, rounds)
        absent = launcher.absent()
    return _report(stages, supervisor, absent, cost_of_calls(settings))


def _supervisors_part(
    settings: Settings, launcher: LadderLauncher, rounds: int
) -> dict[str, list[float]]:
    """Return what is measured outside the cell: cgroups alone, and whole calls."""
    names = iter(range(1, 1_000_000))

    def cgroup() -> None:
        made = launcher.cgroup(f"cell-{next(names)}")
        made.usage()
        made.close_descriptors()
        made.remove()

    with (
        sandbox(settings, pool=0) as audited,
        sandbox(settings, pool=0, audit=False) as quiet,
        sandbox(settings) as pooled,
    ):
        return side_by_side(
            [
                Contender(_CGROUP, cgroup),
                Contender(_QUIET, partial(quiet.execute, SUM.source)),
                Contender(_DEMAND, partial(audited.execute, SUM.source)),
                Contender(_READY, partial(pooled.execute, SUM.source), pooled.settle),
            ],
            rounds,
        )


# What is said of it


class Step(NamedTuple):
    name: str
    gone: float  # microseconds more, until nothing is left
    ready: float | None  # microseconds more, until the layer is on
    call: float | None  # nanoseconds of one system call behind it


def _steps(
    stages: TimesByStage, supervisor: dict[str, list[float]], absent: dict[str, str]
) -> list[Step]:
    """Return what each stage of a cell adds to the one below, and then the supervisor's part."""
    order = [FORK, AHEAD, *(f"+ {name}" for name in _names(stages))]
    steps, below = [], StageTimes([0.0], [0.0])
    for name in order:
        stage = stages[name]
        if stage.refused or name.removeprefix("+ ") in absent:
            continue
        gone, ready = (
            (_cost(now) - _cost(then)) * _US
            for now, then in ((stage.gone, below.gone), (stage.ready, below.ready))
        )
        steps.append(Step(name, gone, ready, _cost(stage.call) * 1e9))
        below = stage
    cgroup = 0.0 if "cgroup" in absent else _cost(supervisor[_CGROUP])
    quiet, audited = _cost(supervisor[_QUIET]), _cost(supervisor[_DEMAND])
    rest = quiet - cgroup - _cost(below.gone)
    parts = ((_CGROUP, cgroup), (_REST, rest), (_AUDIT, audited - quiet))
    return [*steps, *(Step(name, cost * _US, None, None) for name, cost in parts if cost)]


def _cost(seconds: list[float]) -> float:
    """Return the lower quartile: a busy machine only ever adds, and a step is a small difference."""
    return percentile(seconds, 0.25)


def _names(stages: TimesByStage) -> list[str]:
    """Return the steps of a cell: the stages from the sweep of descriptors on."""
    names = [name.removeprefix("+ ") for name in stages if name.startswith("+ ")]
    return names[names.index("descriptor sweep") :]


def _report(
    stages: TimesByStage,
    supervisor: dict[str, list[float]],
    absent: dict[str, str],
    calls: ReportTable,
) -> Report:
    steps = _steps(stages, supervisor, absent)
    return Report(
        name="ladder",
        title="What each layer costs",
        tables=(_cumulative(steps, absent), _singly(stages), _calls_made(supervisor), calls),
        charts=(
            Bars(
                title="A call on demand, from a bare fork up: until nothing of its cell is left",
                unit="microseconds, lower quartiles",
                bars=tuple(Bar(step.name, step.gone) for step in steps),
                stacked=True,
            ),
            _bars_of_namespaces(stages),
        ),
        verdicts=_verdicts(stages, supervisor),
        notes=(
            "The steps are the list of runner/cell/enter.py, in a launcher of their own.",
            "A call that finds a cell ready pays for the last steps only; the rest was done before.",
            "A stage that costs less than nothing is noise, or spares a later one its work.",
        ),
        samples={name: tuple(stage.gone) for name, stage in stages.items()}
        | {name: tuple(times) for name, times in supervisor.items()},
    )


def _cumulative(steps: list[Step], absent: dict[str, str]) -> ReportTable:
    rows: list[tuple[Value, ...]] = []
    total = 0.0
    for step in steps:
        total += step.gone
        rows.append((step.name, step.ready, step.gone, total, step.call))
    rows += [(f"{name}: absent, {why}", None, None, None, None) for name, why in absent.items()]
    columns = ("more us until it is on", "more us until all is gone", "sum us", "ns a getppid(2)")
    return ReportTable(
        title="Layers added up",
        columns=(Column("layer"), *(Column(title, 0) for title in columns)),
        rows=tuple(rows),
        note="Differences of lower quartiles.  `the four made ahead`: pid, net, ipc, uts of an "
        "init that the nursery had ready, and a new mount namespace.",
    )


def _singly(stages: TimesByStage) -> ReportTable:
    rows: list[tuple[Value, ...]] = [
        (name, *quartiles(stage.gone, _US)) for name, stage in _of_namespaces(stages).items()
    ]
    return ReportTable(
        title="Namespaces, each made for one fork and gone after it",
        columns=(Column("namespaces"), *quartile_columns("us", 0)),
        rows=tuple(rows),
        note="The kernel takes network namespaces down later, and that is in no row.",
    )


def _of_namespaces(stages: TimesByStage) -> TimesByStage:
    names = list(stages)
    return {name: stages[name] for name in names[: names.index(AHEAD) + 1]}


def _bars_of_namespaces(stages: TimesByStage) -> Bars:
    bars = [quartile_bar(name, stage.gone, _US) for name, stage in _of_namespaces(stages).items()]
    return Bars(
        title="Namespaces: a fork into new ones, until its end",
        unit="microseconds, medians with quartiles",
        bars=tuple(bars),
    )


def _calls_made(supervisor: dict[str, list[float]]) -> ReportTable:
    rows: list[tuple[Value, ...]] = [
        (name, *quartiles(times, _US)) for name, times in supervisor.items()
    ]
    columns = (Column("what"), *quartile_columns("us", 0))
    return ReportTable(title="Whole calls, `1+1`", columns=columns, rows=tuple(rows))


def _verdicts(stages: TimesByStage, supervisor: dict[str, list[float]]) -> tuple[Criterion, ...]:
    demand, ready = median(supervisor[_DEMAND]), median(supervisor[_READY])
    refused = {name: stage.refused for name, stage in stages.items() if stage.refused}
    return (
        Criterion("every stage could be measured", not refused, str(refused or "yes")),
        Criterion(
            "a call that finds a cell ready costs less than one that does not",
            ready < demand,
            f"{demand / ready:.1f} times less",
        ),
    )

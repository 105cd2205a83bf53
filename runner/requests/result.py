"""`SandboxResult`: the outcome of an execution; and `Chart`, the data of a chart that its program drew.

The guest reads the data from its figures (`cell/pictures.py`).  It may lie, so the types limit every
part: 256 KiB of charts decode to less than 12 MiB.
"""

import enum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ...policies.source.findings import Finding
from ..cells.workspace import Artifact, KeptWorkspace, Uncollected, WorkspaceFile
from ..messages import MOST_CHART_BYTES, MOST_CHARTS, decode

_LARGEST = 1.7976931348623157e308  # largest float; infinities and NaN are refused
_MANY = 10_000
_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Coordinate = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | _Text | None
_Point = Annotated[tuple[_Coordinate, ...], msgspec.Meta(max_length=64)]
_MOST_TICKS = 64
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

SeriesType = Literal["line", "scatter", "bar", "pie", "box"]


class ChartAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An axis: its label, the unit at the end of that in parentheses or brackets, and its scale, such
    as linear, log, categorical or datetime.

    ticks, tick_labels: the places of the ticks, moments on an axis of times, and what stands there
    """

    label: _Text = ""
    unit: _Text = ""
    scale: _Text = "linear"
    ticks: Annotated[tuple[_Coordinate, ...], msgspec.Meta(max_length=_MOST_TICKS)] = ()
    tick_labels: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=_MOST_TICKS)] = ()


class ChartSeries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A series of points, each of numbers, texts and None for what is missing.

    line, scatter: (x, y)
    bar: (category or position, value)
    pie: (label, share of the circle)
    box: (category or position, low end, first quartile, median, third quartile, high end)

    total: how many points it has in the figure; of many, some at even distances are kept
    outliers: of boxes: (category or position, value)
    """

    type: SeriesType
    label: _Text = ""
    points: Annotated[tuple[_Point, ...], msgspec.Meta(max_length=_MANY)] = ()
    total: _Count = 0
    outliers: Annotated[tuple[_Point, ...], msgspec.Meta(max_length=_MANY)] = ()


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data of one pair of axes in a figure; `picture` names the artifact that shows the figure.

    series: empty if the axes show something else
    figure, figure_title: its text, such as <Figure size 640x480 with 1 Axes>, and its own title
    """

    title: _Text = ""
    x: ChartAxis = ChartAxis()
    y: ChartAxis = ChartAxis()
    series: Annotated[tuple[ChartSeries, ...], msgspec.Meta(max_length=64)] = ()
    picture: _Text = ""
    figure: _Text = ""
    figure_title: _Text = ""


_Charts = Annotated[tuple[tuple[_Count, Chart], ...], msgspec.Meta(max_length=MOST_CHARTS)]


def charts_of(data: bytes, names: tuple[str, ...]) -> tuple[Chart, ...]:
    """Return the charts in the words of a guest, none if these are malformed; each has the number of
    its picture, counted from 1, in `names`."""
    if len(data) > MOST_CHART_BYTES:
        return ()
    try:
        told: tuple[tuple[int, Chart], ...] = decode(data, _Charts)
    except msgspec.DecodeError:
        return ()
    return tuple(
        msgspec.structs.replace(chart, picture=names[at - 1] if 0 < at <= len(names) else "")
        for at, chart in told
    )


Reason = Literal[
    "exit", "exception", "signal", "wall_time", "cpu_time", "memory", "output", "violation",
    "validation", "cancelled", "approval", "diverged", "compile",
]  # fmt: skip


_SHOWN = 40  # characters of a value, an error or a stream in `repr(result)`


class SandboxStatus(enum.Enum):
    """The coarse state of an execution; `reason` on the result says exactly why."""

    __hash__ = object.__hash__  # by identity, as they compare: Enum's own is a function of Python
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # the program ended by itself, badly
    TIMEOUT = "timeout"  # wall or CPU time
    REJECTED = "rejected"  # refused before anything ran
    KILLED = "killed"  # killed by cellwright or the kernel at a cap
    CANCELLED = "cancelled"  # by the caller


class Usage(msgspec.Struct, frozen=True):
    """The cell's usage as the kernel counted it; 0 where this host does not count.

    `killed_for_memory`: processes that the kernel killed at the memory limit, children of the program
    too; `memory_limit_reached`: the cell had all the memory that it may have, perhaps as cache;
    `forks_refused`: processes and threads beyond limits.processes that could not be started.  In a
    session peaks are of its whole life, and the other numbers of this request.  `gpu_memory_peak_bytes`
    and `gpu_seconds`: as NVML samples them, None without a GPU or NVML.
    """

    wall_seconds: float = 0.0
    cpu_user_seconds: float = 0.0
    cpu_system_seconds: float = 0.0
    memory_peak_bytes: int = 0
    processes_peak: int = 0
    output_bytes: int = 0
    killed_for_memory: int = 0
    memory_limit_reached: bool = False
    forks_refused: int = 0
    gpu_memory_peak_bytes: int | None = None
    gpu_seconds: float | None = None


SEVERAL = "several"  # `process` of a violation that counts attempts of several processes


class Violation(msgspec.Struct, frozen=True):
    """A forbidden attempt of the guest, seen from outside."""

    syscall: str
    arguments: tuple[str, ...]
    rule: str
    process: str
    count: int = 1


class NetworkConnection(msgspec.Struct, frozen=True):
    """A connection of a program to a name that the policy allows, as the egress process counted it.

    `address` is the one that was dialled, empty if none was; `outcome` is "ok", or why it ended.
    """

    name: str
    port: int
    address: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    outcome: str
    rule: str


class NetworkRecord(NamedTuple):
    """A cell's use of the network since the last report."""

    refused: tuple[Violation, ...] = ()
    connections: tuple[NetworkConnection, ...] = ()


class Phases(msgspec.Struct, frozen=True):
    """The time of a call by phase, in seconds.  `lease`: until a cell was ready, including waiting
    for a turn and building one on demand; `send`: handing the program over; `run`: until its last
    frame; `reply`: counting its usage; `teardown`: the part of it that the caller waited for, none
    with a pool; `resume`: until a paused session was back, before all others."""

    lease: float = 0.0
    send: float = 0.0
    run: float = 0.0
    reply: float = 0.0
    teardown: float = 0.0
    resume: float = 0.0


class CompileResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a compiler ended: `output` is what it printed, its errors before anything else; `seconds` of
    wall time, those of the first time if its result was `cached`."""

    ok: bool
    status: SandboxStatus
    reason: Reason
    output: str = ""
    exit_code: int | None = None
    error: str | None = None
    seconds: float = 0.0
    cached: bool = False
    usage: Usage = Usage()


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one execution.

    `value`, `error`, `traceback` and `charts` come from the guest; everything else was observed from
    outside.  `execution_time` is wall time in seconds from the request to the last trace of the
    cell; `files` are those below /workspace that it made or changed, `artifacts` what was collected of
    them, `uncollected` what `collect` asked for and could not be brought; `truncated` counts the
    bytes dropped of each stream and of the value; `layers` are the layers in force.
    `traceparent` passes the trace on (W3C Trace Context); `audited` is False if some of its
    records could not be written to the trail when they were due.  `session_lost`: the session
    ended with this request.  `notices`: what was changed in the source, and what to use in place of
    lines that are not Python, made from the words of the program; processes that the kernel killed for
    memory.  `workspace`: what became of the
    named one that it was given.  `connections`: to names of the network that the policy allows.
    `evaluator`: "monty" if that answered, outside every layer, and no cell was made.
    `compile`: how the compiler of a compiled language ended; if it failed, nothing ran.
    """

    status: SandboxStatus
    reason: Reason
    stdout: str = ""
    stderr: str = ""
    value: Any = None
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    traceback: str | None = None
    execution_time: float = 0.0
    usage: Usage = Usage()
    violations: tuple[Violation, ...] = ()
    findings: tuple[Finding, ...] = ()
    notices: tuple[str, ...] = ()
    truncated: dict[str, int] = {}
    files: tuple[WorkspaceFile, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    charts: tuple[Chart, ...] = ()
    uncollected: tuple[Uncollected, ...] = ()
    layers: tuple[str, ...] = ()
    execution_id: str = ""
    trace_id: str | None = None
    traceparent: str | None = None
    audited: bool = True
    pool_hit: bool = False
    phases: Phases = Phases()
    connections: tuple[NetworkConnection, ...] = ()
    session_id: str | None = None
    session_lost: bool = False
    workspace: KeptWorkspace | None = None
    evaluator: str = ""
    compile: CompileResult | None = None

    @property
    def ok(self) -> bool:
        """Whether the program ran to its end and reported success."""
        return self.status is SandboxStatus.COMPLETED

    @property
    def hints(self) -> tuple[str, ...]:
        """Advice about refused attempts, failed imports and reached limits: text made from the
        guest's messages."""
        from ...policies.advice.hints import hints

        return hints(
            self.error, self.violations, self.usage,
            timed_out=self.status is SandboxStatus.TIMEOUT,
            stderr="" if self.ok else self.stderr,
        )  # fmt: skip

    def for_model(self) -> "SandboxResult":
        """Return the text that a model may see; with the `privacy` of a sandbox it has tokens in
        place of values."""
        return self

    def __repr__(self) -> str:
        """Return one line: how it ended, the beginning of its output, and a list of the rest."""
        said = {name: getattr(self, name) for name in ("value", "error", "stdout", "stderr")}
        made = {
            name: len(getattr(self, name))
            for name in ("violations", "connections", "findings", "files", "artifacts")
        }
        parts = [
            f"status={self.status.name}",
            f"reason={self.reason!r}",
            *(
                f"{name}={_beginning(each)}"
                for name, each in said.items()
                if each not in (None, "")
            ),
            *(f"{name}: {count}" for name, count in made.items() if count),
        ]
        if self.truncated:
            parts.append(f"truncated={self.truncated}")
        if self.session_lost:
            parts.append("session_lost=True")
        return f"SandboxResult({', '.join(parts)}, {self.execution_time * 1000:.1f} ms)"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values for any JSON encoder."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"ok": self.ok, "hints": list(self.hints)}


def _beginning(value: Any) -> str:
    """Return `repr`, for a long one its beginning and length.

    Reads only the beginning of a long text, which may have megabytes.
    """
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... ({len(value):,} characters)"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown):,} characters)"

"""`Overview`: everything that the page shows, as plain values.

A part that no source tells is None or empty, never a guess.  Times are in seconds since the epoch,
durations in seconds.  Texts may come from guests: `encoding.py` bounds and escapes every one of them.
"""

from typing import Any, Literal

import msgspec

Source = Literal["trail", "runs", "server"]


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an audit trail's chain of hashes; `broken` says where it ends to hold.

    state: `unchecked` means that a server tells the head and nobody has read the file again
    """

    state: Literal["intact", "broken", "unchecked", "memory"]
    records: int
    first: int
    head_seq: int
    head_hash: str
    broken: str = ""
    has_key: bool = False  # it was checked with a key


class Event(msgspec.Struct, kw_only=True):
    """One record; `at` is its distance from the beginning of its run, or its time if it is of no run.

    The record of a call of a tool has what became of it: `ended`, after `seconds`.
    """

    seq: int
    at: float
    category: str
    action: str
    target: str
    allowed: bool
    about: dict[str, Any] = {}
    ended: str = ""
    seconds: float | None = None


class RunView(msgspec.Struct, kw_only=True):
    """One program: how it ended, and its records in order.

    state: how its end was recorded (`ok`, `error`, `timeout`, `oom`, `killed`, `cancelled`, `lost`),
    `refused` if nothing ran, `running` if no end is recorded
    """

    id: str
    trace_id: str
    language: str
    began: float
    sandbox_id: str = ""
    session_id: str = ""
    parent: str = ""  # the run whose tool call caused it
    state: str = "running"
    reason: str = ""
    wall_seconds: float | None = None
    memory_peak_bytes: int | None = None
    output_bytes: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    source_sha256: str = ""
    source_bytes: int | None = None
    phases: dict[str, float] = {}
    events: list[Event] = []
    events_left_out: int = 0


class SessionView(msgspec.Struct, kw_only=True):
    """A session that a trail tells of."""

    id: str
    sandbox_id: str
    opened: float
    ended: float | None = None
    ending: str = ""
    runs: int = 0
    events: list[Event] = []  # what it did between requests
    events_left_out: int = 0


class CellView(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox or session that lives now, with what it uses; None where nothing counts."""

    id: str
    kind: str
    state: str
    policy: str
    language: str
    session: str
    memory_bytes: int | None
    cpu_seconds: float | None
    age_seconds: float
    idle_seconds: float | None


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call of a durable run, its arguments and answer as a person reads them."""

    number: int
    tool: str
    state: str
    arguments: str
    answer: str


class DurableRun(msgspec.Struct, frozen=True, kw_only=True):
    """A durable run with its calls."""

    run: str
    state: str
    began: float
    language: str
    ending: str
    calls: list[CallView]
    calls_left_out: int = 0


class WaitingCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits for a person.

    `digest` is the hash of its tool and arguments: a decision repeats it, so that it holds for what the
    page showed.  A call that cannot be shown whole cannot be approved here.
    """

    approval: str
    run: str
    tool: str
    description: str
    reason: str
    arguments: str
    digest: str
    is_whole: bool
    asked: float
    expires: float
    client: str = ""  # of a server


class ToolView(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the registry with its counts."""

    name: str
    version: int
    state: str
    owner: str
    maker: str
    description: str
    created_at: str
    risky: bool
    uses: int
    failures: int
    failures_in_a_row: int


class CalledTool(msgspec.Struct, kw_only=True):
    """How often a trail tells of a tool."""

    name: str
    calls: int = 0
    failed: int = 0
    refused: int = 0
    waited: int = 0


class SkillView(msgspec.Struct, frozen=True, kw_only=True):
    """A skill; `used` is when a kept one was last kept or loaded.  `uses` and `failures` are counted
    since the server began."""

    name: str
    reference: str
    description: str
    state: str
    version: int
    used: float | None
    uses: int
    failures: int


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A number that a server tells now, and the limit of it."""

    name: str
    value: float
    most: float | None = None
    unit: Literal["", "bytes"] = ""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """How many tools had been made when so many tasks were done."""

    tasks: int
    tools: int
    time: float


class Overview(msgspec.Struct, kw_only=True):
    """What the page shows.  The order matters: if all texts are too long, the last are cut."""

    source: Source
    name: str
    made: float
    approvals: list[WaitingCall] = []
    runs_file: str = ""
    chain: Chain | None = None
    counts: dict[str, int] = {}  # records by kind
    gauges: list[Gauge] = []
    cells: list[CellView] | None = None
    curve: list[Point] = []
    tools: list[ToolView] | None = None
    called_tools: list[CalledTool] = []
    skills: list[SkillView] | None = None
    sessions: list[SessionView] = []
    runs: list[RunView] = []
    durable: list[DurableRun] | None = None
    other: list[Event] = []  # records of no run
    left_out: dict[str, int] = {}

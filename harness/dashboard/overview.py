"""`Overview`: everything that the page shows, as plain values.

A part that no source tells is None or empty, never a guess.  Times are in seconds since the epoch,
durations in seconds.  Texts may come from guests: `dashboard_page.py` bounds and escapes every one of
them.

The parts of an overview from runs, a registry, skills, an agent's memory and the living cells.
"""

import bisect
import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from ...policies.errors import ApprovalRequired
from ...runner.launching.living import Living, list_living, use_of
from ..agent.agent_memory import AgentMemory
from ..runs.durable_runs import RunCall, Runs
from ..runs.run_store import Approval
from ..schemas.spec import ToolSpec
from ..skills.skill_store import SkillUsage
from ..skills.skills import FoundSkill, Skills
from ..text.terminal_text import MOST_LISTED, present, presented_whole, shortened
from ..tools.approval import digest
from ..tools.registry import ToolRegistry

Source = Literal["trail", "runs", "server"]


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an audit trail's chain of hashes; `broken` says where it breaks.

    state: `unchecked` means that a server tells the head and nobody has read the file again
    """

    state: Literal["intact", "broken", "unchecked", "memory"]
    records: int
    first: int
    head_seq: int
    head_hash: str
    broken: str = ""
    has_key: bool = False  # True if the chain was checked with a key


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
    events: list[Event] = []  # events between requests
    events_left_out: int = 0


class CellView(msgspec.Struct, frozen=True, kw_only=True):
    """A living sandbox or session with its usage; None if nothing counts it."""

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

    `digest` is the hash of its tool and arguments: a decision repeats it, so that it holds for the call
    that the page showed. A call that cannot be shown whole cannot be approved here.
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
    client: str = ""  # the client of a server


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
    """The content of the page. The order matters: if all texts are too long, the last are cut."""

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
    other: list[Event] = []  # records that belong to no run
    left_out: dict[str, int] = {}


MOST_DURABLE = 200
MOST_CALLS = 200  # shown calls of one durable run
MOST_WAITING = 100
MOST_TOOLS = 1000
_MOST_CELLS = 1000
_MOST_POINTS = 2000


def add_runs(overview: Overview, runs: Runs, only: str = "") -> None:
    """Add the durable runs, the latest first, and the calls that wait; with `only` those of one run.

    Raises PolicyError if there is no run `only`.
    """
    waiting = [each for each in runs.pending() if only in ("", each.run)]
    kept = [runs.show(only).run] if only else runs.kept()[::-1]
    add_waiting(overview, [(each, "") for each in waiting])
    overview.durable = []
    for each in kept[:MOST_DURABLE]:
        calls = runs.calls(each.run)
        overview.durable.append(
            DurableRun(
                run=each.run, state=each.state, began=each.began, language=each.language,
                ending=each.ending, calls=[_call(call) for call in calls[:MOST_CALLS]],
                calls_left_out=max(0, len(calls) - MOST_CALLS),
            )
        )  # fmt: skip
    _leave_out(overview, "durable runs", kept, MOST_DURABLE)


def add_waiting(overview: Overview, waiting: Sequence[tuple[Approval, str]]) -> None:
    """Add the calls that wait, each with its client's name."""
    overview.approvals = [waiting_call(*each) for each in waiting[:MOST_WAITING]]
    _leave_out(overview, "calls that wait", waiting, MOST_WAITING)


def waiting_call(asked: Approval, client: str = "") -> WaitingCall:
    """Return a call as the page shows it."""
    try:
        arguments, is_whole = presented_whole(asked.tool, asked.arguments), True
    except ApprovalRequired as refused:
        arguments = f"{refused}\n{present(asked.arguments, MOST_LISTED).text}"
        is_whole = False
    return WaitingCall(
        approval=asked.approval, run=asked.run, tool=asked.tool, description=asked.description,
        reason=asked.reason, arguments=arguments, digest=digest(asked.tool, asked.arguments),
        is_whole=is_whole, asked=asked.asked, expires=asked.expires, client=client,
    )  # fmt: skip


def _call(call: RunCall) -> CallView:
    return CallView(
        number=call.number, tool=call.tool, state=call.state.value,
        arguments=present(call.arguments, MOST_LISTED).text, answer=shortened(call.answer),
    )  # fmt: skip


def add_tools(overview: Overview, registry: ToolRegistry) -> None:
    """Add the tools of a registry with their counts, the most used first."""
    specs = registry.list_tools(retired=True)
    rows = sorted((_tool(registry, each) for each in specs), key=lambda row: -row.uses)
    overview.tools = rows[:MOST_TOOLS]
    _leave_out(overview, "tools", rows, MOST_TOOLS)


def _tool(registry: ToolRegistry, spec: ToolSpec) -> ToolView:
    usage = registry.usage(spec.name)
    return ToolView(
        name=spec.name, version=spec.version, state=spec.state.value, owner=spec.owner.value,
        maker=spec.provenance.maker, description=spec.description, created_at=spec.created_at,
        risky=spec.risky, uses=usage.uses, failures=usage.failures,
        failures_in_a_row=usage.in_a_row,
    )  # fmt: skip


def add_skills(overview: Overview, skills: Skills) -> None:
    """Add the skills that were found."""
    used = {(each.skill.name, each.version): each.used for each in skills.store.versions()}
    found = skills.found()
    overview.skills = [
        _skill(each, used, skills.usages.of(each.name)) for each in found[:MOST_TOOLS]
    ]
    _leave_out(overview, "skills", found, MOST_TOOLS)


def _skill(found: FoundSkill, used: dict[tuple[str, int], float], usage: SkillUsage) -> SkillView:
    state = "trusted" if found.is_trusted else "untrusted"
    return SkillView(
        name=found.name, reference=found.reference, version=found.version,
        description=found.problem or found.description, state=state if found.hash else "invalid",
        used=used.get((found.name, found.version)), uses=usage.uses, failures=usage.failures,
    )  # fmt: skip


def add_curve(overview: Overview, agents: Iterable[tuple[ToolRegistry, AgentMemory]]) -> None:
    """Add how many tools had been made at the end of each completed task, of all these agents."""
    made: list[float] = []
    done: list[float] = []
    for registry, memory in agents:
        specs = registry.list_tools(retired=True)
        made += filter(None, (_made(spec) for spec in specs if registry.is_made(spec)))
        done += [each.ended for each in memory.episodes() if each.status == "completed"]
    made.sort()
    points = [
        Point(tasks=number, tools=bisect.bisect_right(made, ended), time=ended)
        for number, ended in enumerate(sorted(done), 1)
    ]
    overview.curve = points[:: len(points) // _MOST_POINTS + 1]


def _made(spec: ToolSpec) -> float:
    """Return when a tool was made; 0 if its record does not say."""
    try:
        return datetime.datetime.fromisoformat(spec.created_at).timestamp()
    except ValueError:
        return 0.0


def add_cells(overview: Overview) -> None:
    """Add the sandboxes and sessions of this user that live now."""
    living = [each for each in list_living() if each.record.process.is_alive()]
    overview.cells = [_cell(each) for each in living[:_MOST_CELLS]]
    _leave_out(overview, "cells", living, _MOST_CELLS)


def _cell(living: Living) -> CellView:
    record, use = living.record, use_of(living)
    state = "orphan" if not record.supervisor.is_alive() else "frozen" if use.is_frozen else "live"
    return CellView(
        id=living.id, kind=record.kind, state=state, policy=record.policy,
        language=record.language, session=record.session, memory_bytes=use.memory_bytes,
        cpu_seconds=use.cpu_seconds, age_seconds=use.age_seconds, idle_seconds=use.idle_seconds,
    )  # fmt: skip


def _leave_out(overview: Overview, what: str, found: "Iterable[object]", most: int) -> None:
    if (more := len(list(found)) - most) > 0:
        overview.left_out = {**overview.left_out, what: more}

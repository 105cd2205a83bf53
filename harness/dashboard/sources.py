"""The parts of an overview from runs, a registry, skills, an agent's memory and the living cells."""

import bisect
import datetime
from collections.abc import Iterable, Sequence

from ...policies.errors import ApprovalRequired
from ...runner.living import Living, list_living, use_of
from ..agent.memory import AgentMemory
from ..runs.durable_runs import RunCall, Runs
from ..runs.store import Approval
from ..schemas.spec import ToolSpec
from ..skills.skills import FoundSkill, Skills
from ..skills.usage import SkillUsage
from ..text.presentation import MOST_LISTED, present, presented_whole, shortened
from ..tools.approval import digest
from ..tools.registry import ToolRegistry
from .overview import (
    CallView,
    CellView,
    DurableRun,
    Overview,
    Point,
    SkillView,
    ToolView,
    WaitingCall,
)

MOST_DURABLE = 200
MOST_CALLS = 200  # of one durable run
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

"""`Planner`: has a model propose several plans, and chooses by what is known about their tools.

A plan is advice in the conversation; it gives no right to anything.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ...policies.errors import ToolError
from ..schemas.spec import ToolSpec
from ..text.hidden import line, prose
from .memory import AgentMemory, Recipe, UsedTool
from .messages import ChatModel, Message, Sampling
from .reply import fenced_blocks

MOST_PLANS, MOST_STEPS = 5, 12
_INSTRUCTIONS = """\
Propose {count} different plans for the task. Reply with JSON only:
{{"plans": [{{"steps": [{{"what": "one step in words", "tool": "name of a tool, or null"}}]}}]}}
Tools: {tools}"""
_SCHEMA = {
    "type": "object",
    "properties": {"plans": {"type": "array", "items": {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "tool": {"type": ["string", "null"]}},
            "required": ["what", "tool"], "additionalProperties": False,
        }}},
        "required": ["steps"], "additionalProperties": False,
    }}},
    "required": ["plans"], "additionalProperties": False,
}  # fmt: skip
# The weights of a plan's score: a tool that is there and has served, and the price of what is not.
_HISTORY, _RECIPE, _STEP, _MISSING, _RISKY = 2.0, 1.0, 0.1, 1.0, 0.5


class PlanStep(msgspec.Struct, frozen=True):
    what: str
    tool: str | None = None


class AgentPlan(msgspec.Struct, frozen=True):
    """Steps that a model proposes, in order."""

    steps: tuple[PlanStep, ...]


class _Proposal(msgspec.Struct, frozen=True):
    plans: tuple[AgentPlan, ...]


class ScoredPlan(NamedTuple):
    """A plan with its score; the larger, the better.  `reasons` says what counted."""

    plan: AgentPlan
    score: float
    reasons: tuple[str, ...]

    def text(self) -> str:
        """Return the plan as the model reads it."""
        lines = [
            f"{place}. {line(step.what)}"
            + (f" (tool: {line(step.tool, 128)})" if step.tool else "")
            for place, step in enumerate(self.plan.steps, 1)
        ]
        return "\n".join(lines)


class Planner:
    """Proposes `count` plans and chooses one; with an equal `seed` and equal replies the same one."""

    def __init__(self, count: int = 3, seed: int = 0) -> None:
        self._count, self._seed = max(1, min(count, MOST_PLANS)), seed

    def plan(
        self, model: ChatModel, task: str, tools: Sequence[ToolSpec], memory: AgentMemory,
        recipes: Sequence[Recipe] = (), failure: str = "",
    ) -> ScoredPlan | None:  # fmt: skip
        """Return the best of the proposed plans, None if none is usable.  Raises ModelError.

        `failure`: why the plan before did not work.
        """
        named = ", ".join(f"{each.name} ({line(each.description, 80)})" for each in tools[:30])
        asked = prose(task, 4000) + (f"\nThe last plan failed: {prose(failure)}" if failure else "")
        messages = [
            Message("system", _INSTRUCTIONS.format(count=self._count, tools=named or "none")),
            Message("user", asked),
        ]
        reply = model.ask(messages, Sampling(0.7, self._seed), schema=_SCHEMA)
        specs = {each.name: each for each in tools}
        scored = [self.score(each, specs.get, memory, recipes) for each in _plans(reply.text)]
        return max(scored, key=lambda each: each.score, default=None)

    def score(
        self, plan: AgentPlan, spec_of: Callable[[str], ToolSpec | None], memory: AgentMemory,
        recipes: Sequence[Recipe] = (),
    ) -> ScoredPlan:  # fmt: skip
        """Return a plan with its score: the history of its tools, its cost, its risk by policy."""
        score = 0.0
        reasons: list[str] = []
        for name in dict.fromkeys(each.tool for each in plan.steps if each.tool):
            spec = _found(spec_of, name)
            if spec is None:
                score, reasons = score - _MISSING, [*reasons, f"{name} is missing"]
                continue
            well, runs = memory.successes_of(UsedTool(spec.name, spec.digest))
            score += _HISTORY * (well + 1) / (runs + 2)
            if spec.risky:
                score, reasons = score - _RISKY, [*reasons, f"{name} needs approval"]
            if any(name in recipe.tools for recipe in recipes):
                score, reasons = score + _RECIPE, [*reasons, f"{name} solved a similar task"]
        score -= _STEP * len(plan.steps)
        return ScoredPlan(plan, round(score, 6), tuple(reasons))


def _found(spec_of: Callable[[str], ToolSpec | None], name: str) -> ToolSpec | None:
    try:
        return spec_of(name)
    except ToolError:
        return None


def _plans(text: str) -> list[AgentPlan]:
    """Return the plans of a reply, also from a fenced block; none if it is not of the form."""
    blocks, _ = fenced_blocks(text)
    for candidate in (text, *(each.text for each in blocks)):
        try:
            found = msgspec.json.decode(candidate.strip(), type=_Proposal)
        except (ValueError, RecursionError):
            continue
        return [each for each in found.plans[:MOST_PLANS] if 0 < len(each.steps) <= MOST_STEPS]
    return []

"""`Planner`: has a model propose several plans, and chooses one by the record of its tools.

A plan is advice in the conversation; it gives no right to anything.

`read_reply`: classifies a model's reply: a program, a final answer, or unusable.

Every action becomes Python, because there is one way of doing something: a program in the session's
cell.  A model that cannot write code may write `Action:` and `Action Input:`, or use tool calling.

`Toolsmith`: has a model write a tool with its tests, and repairs it by the errors of its cell.

That the tests of a tool pass makes it TESTED, not TRUSTED: the same model wrote both.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ...policies import errors
from ..making.factory import ToolFactory
from ..schemas.spec import Provenance, ToolSpec, ToolState, normalised
from ..text.hidden import line, prose
from .agent_memory import AgentMemory, Recipe, UsedTool
from .prompts import ChatModel, Message, ModelReply, Sampling, ToolRequest

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
# Weights in a plan's score: a bonus for an existing tool that has served, a price for a missing tool.
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
    except errors.ToolError:
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


# The tool that a model with tool calling may call: its argument is `code`.
RUN_PYTHON = "run_python"
_FENCE = "```"
_PYTHON = frozenset(("python", "py", "python3", "tool_code", ""))
_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*`?([A-Za-z_][\w.]*)`?[ \t]*$", re.M)
_INPUT = re.compile(r"^[ \t]*Action[ \t]*Input[ \t]*:", re.M | re.I)
_ANSWER = re.compile(r"^[ \t]*Final[ \t]*Answer[ \t]*:[ \t]*", re.M | re.I)
# Markers that model families write around a call, and that servers sometimes leave in the text.
_CONTROL = re.compile(r"<\|[a-z_]{1,24}\|>|</?tool_call>")
_THINKING, _THOUGHT = "<think>", re.compile(r"^[ \t]*</think>[ \t]*$", re.M)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class Block(NamedTuple):
    """A fenced block: the word after its fence in lower case, and its text."""

    name: str
    text: str


class CodeAction(NamedTuple):
    """Run this program; `thought` is the text before it."""

    thought: str
    code: str


class FinalAnswer(NamedTuple):
    """The task is done, and this is the answer."""

    text: str


class Unusable(NamedTuple):
    """An unusable reply; the model gets `why`."""

    why: str


Action = CodeAction | FinalAnswer | Unusable


def read_reply(reply: ModelReply) -> Action:
    """Return the action that a reply asks for; a reply is never executed in part."""
    text = _CONTROL.sub("", _without_thinking(reply.text))
    if reply.requests:
        return _requested(text, reply.requests)
    blocks, is_open = fenced_blocks(text)
    if code := [each.text for each in blocks if each.name in _PYTHON]:
        return CodeAction(text.partition(_FENCE)[0].strip(), "\n".join(code))
    if reply.finish in ("length", "cut"):
        return Unusable("it ended in the middle: it was too long, or the server stopped")
    if blocks or is_open:
        return Unusable("it has a code block that does not end, or is not Python")
    if action := _ACTION.search(text):
        return _react(text, action)
    if answer := _ANSWER.search(text):
        return FinalAnswer(text[answer.end() :].strip())
    if not text.strip():
        return Unusable("it is empty")
    return Unusable("it has no code block, no Action and no Final Answer")


def _without_thinking(text: str) -> str:
    """Return the text after a reasoning model's thoughts, whose drafts of programs must not run.
    Some servers leave out the tag that opens them."""
    if text.lstrip().startswith(_THINKING):
        return text.partition("</think>")[2]
    ended = _THOUGHT.search(text)
    return text[ended.end() :] if ended else text


def fenced_blocks(text: str) -> tuple[list[Block], bool]:
    """Return the blocks between fences, and whether the last fence is open."""
    blocks: list[Block] = []
    name: str | None = None
    held: list[str] = []
    for each in text.splitlines():
        word = each.strip()
        if name is None and word.startswith(_FENCE) and _FENCE not in word[3:]:
            name, held = word[3:].strip().partition(" ")[0].lower(), []
        elif name is not None and word == _FENCE:
            blocks.append(Block(name, "\n".join(held)))
            name = None
        elif name is not None:
            held.append(each)
    return blocks, name is not None


def _requested(text: str, requests: tuple[ToolRequest, ...]) -> Action:
    """Return the program of tool calls; several are made in order."""
    lines = []
    for each in requests:
        arguments = _object(each.arguments)
        if arguments is None:
            return Unusable(f"the arguments of {each.name[:64]!a} are not a JSON object")
        lines.append(_call(each.name, arguments))
    return CodeAction(text.strip(), "\n".join(lines))


def _react(text: str, action: "re.Match[str]") -> Action:
    given = _INPUT.search(text, action.end())
    arguments = _object(text[given.end() :].strip().strip("`")) if given else {}
    if arguments is None:
        return Unusable("its Action Input is not a JSON object")
    return CodeAction(text[: action.start()].strip(), _call(action[1], arguments))


def _call(name: str, arguments: dict[str, Any]) -> str:
    """Return Python that makes a call; names and values are literals, so nothing of them is code."""
    if name == RUN_PYTHON and isinstance(arguments.get("code"), str):
        return str(arguments["code"])
    if name in ("final_answer", "FinalResponse"):
        return f"final_answer({next(iter(arguments.values()), None)!r})"
    return f"execute_tool({name!r}, {arguments!r})"


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, also with a comma too many; None if it is not one."""
    for candidate in (text, _TRAILING_COMMA.sub(r"\1", text)):
        try:
            found = msgspec.json.decode(candidate.strip() or "{}")
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else None
    return None


_TOOL_INSTRUCTIONS = """\
You write one tool: a Python function with type annotations and a docstring. It uses the standard
library{packages}, has no access to files, programs or the network, and returns JSON-like data.

Reply with two blocks{third} and nothing else. The first is the function, with its imports:
```python
def name(argument: str) -> dict:
    \"\"\"What it does.\"\"\"
```
The second has tests, which call the function and assert:
```tests
assert name("x") == {{"y": 1}}
```"""
_REQUIREMENTS = """
The third, only if it imports packages, has a requirement in each line:
```requirements
package
```"""
_SHOWN = 2000  # characters of an error that the model gets
_PACKAGES = frozenset(("requirements", "requirements.txt"))
_TESTS = frozenset(("tests", "test", "python", "py"))


class Draft(NamedTuple):
    """The source of a tool, of its tests, and the packages that it imports, as a model wrote them."""

    source: str
    tests: str
    requirements: tuple[str, ...] = ()


class Toolsmith:
    """Makes tools in a ToolFactory, each with at most `attempts` drafts.

    `on_draft` is called with a line about the outcome of each draft. `check` is called before each
    draft, and raises an exception to forbid it.
    """

    def __init__(
        self, model: ChatModel, factory: ToolFactory, *, attempts: int = 4,
        on_draft: Callable[[str], None] = lambda told: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._model, self._factory, self._attempts = model, factory, attempts
        self._on_draft, self._check = on_draft, check

    def build_new_tool(self, name: str, description: str, *, task: str = "") -> ToolSpec:
        """Return a tested tool of that name, or the tool that does the same already.

        Raises ToolInvalid for a name that no tool can have, ToolFailed if no draft passes its tests,
        ModelError, and what `check` raises.
        """
        name = normalised(name)  # first, because the model sees it
        if known := self._known(name):
            return known
        asked = f"Name: {name}\nWhat it must do: {prose(description, 4000)}"
        messages = [
            Message("system", _instructions(self._factory.packages)),
            Message("user", asked),
        ]
        provenance = Provenance(task=task[:1000], model=self._model.name)
        why = ""
        for attempt in range(self._attempts):
            self._check()
            sampling = Sampling(temperature=0.2 * attempt, seed=attempt)
            reply = self._model.ask(messages, sampling)
            try:
                draft = _draft_of(reply.text)
                made = self._factory.create_tool(
                    name, prose(description, 1000), draft.source, tests=[draft.tests],
                    requirements=draft.requirements, provenance=provenance, is_new=True,
                )  # fmt: skip
                self._on_draft(f"{made.reference} is made; its tests pass")
                return made
            except errors.ToolExists as exists:
                return self._factory.get_tool(exists.existing)
            except (
                errors.ToolInvalid,
                errors.PolicyError,
                errors.PackageError,
            ) as error:  # ToolTestFailed among them
                why = str(error)[:_SHOWN]
                self._on_draft(f"draft {attempt + 1} of {name}: {line(why)}")
            messages = [*messages[:2], *_repair(reply.text, why)]
        raise errors.ToolFailed(
            f"{name}: no draft of {self._attempts} passed its tests; the last: {why}",
            "describe the tool more exactly, or do without it",
            tool=name,
        )

    def _known(self, name: str) -> ToolSpec | None:
        try:
            known = self._factory.get_tool(name)
        except errors.ToolNotFound:
            return None
        return self._factory.registry.successor(name) if known.state is ToolState.RETIRED else known


def _instructions(packages: tuple[str, ...] | None) -> str:
    """Return the first message, which names the packages that the tool may have, as far as they fit."""
    if packages == ():
        return _TOOL_INSTRUCTIONS.format(packages=" only", third="")
    named = "packages" if packages is None else ", ".join(packages)[:_SHOWN]
    return (
        _TOOL_INSTRUCTIONS.format(packages=f" and, where they help, {named}", third=", or three,")
        + _REQUIREMENTS
    )


def _repair(text: str, why: str) -> list[Message]:
    return [
        Message("assistant", text),
        Message("user", f"This failed:\n{why}\n\nReply with both blocks again, mended."),
    ]


def _draft_of(text: str) -> Draft:
    """Return the blocks of a reply; raises ToolInvalid if the source or its tests are missing."""
    blocks, _ = fenced_blocks(text)
    named = [each for each in blocks if each.name in _PACKAGES]
    blocks = [each for each in blocks if each.name not in _PACKAGES]
    code = next((each for each in blocks if each.name != "tests" and "def " in each.text), None)
    tests = next((each for each in blocks if _is_tests(each) and each is not code), None)
    if code is None:
        raise errors.ToolInvalid("the reply has no block with a function")
    if tests is None:
        raise errors.ToolInvalid("the reply has no block with tests")
    lines = [each.partition("#")[0].strip() for block in named for each in block.text.splitlines()]
    return Draft(code.text, tests.text, tuple(each for each in lines if each))


def _is_tests(block: Block) -> bool:
    return block.name in _TESTS and "assert" in block.text

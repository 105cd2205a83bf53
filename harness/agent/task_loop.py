"""`TaskLoop`: one run of an agent while this process works on it.

One step asks the model, records its reply, runs its program, and records the outcome. Whatever ends the
process, the next one goes on at the step that was being made, and calls nothing twice.

`AgentTools`: the tools of an agent's programs: actions, made tools and the caller's tools.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...policies.errors import ToolBudgetExceeded, ToolError, ToolNotFound
from ...runner.requests.result import SandboxResult
from ..making.builtin import Summarise, text_summarize
from ..privacy.naming import HOST, PROGRAM
from ..runs.durable_runs import CallState, RunCall, Runs
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..skills.skills import SkillSet
from ..tools.catalogue import Catalogue
from ..tools.tool import Caller, Tool
from .agent_memory import AgentMemory, Recipe, UsedTool
from .planner import CodeAction, FinalAnswer, Planner, Unusable, read_reply
from .prompts import (
    AGAIN,
    USUAL,
    AgentLimits,
    AgentUsage,
    ChatModel,
    Conversation,
    CountTokens,
    Message,
    ModelReply,
    OnText,
    Sampling,
    notes_of,
    observation,
    task_text,
    unusable,
)
from .research import Research, as_data
from .transcript import (
    ANSWER,
    CODE,
    COMPLETED,
    ERROR,
    FAILED,
    PAUSED,
    UNUSABLE,
    AgentEvent,
    AgentResult,
    AgentRun,
    AgentStep,
    StepSession,
    Transcripts,
    call_run,
    run_of,
)

ACTIONS = "agent"  # first part of the names of actions, as if a server offered them
FINAL_ANSWER, BUILD_TOOL = "agent.final_answer", "agent.build_tool"
SEARCH_WEB, READ_PAGE = "agent.search_web", "agent.read_page"
FIND_SKILL, LOAD_SKILL = "agent.find_skill", "agent.load_skill"

Build = Callable[[str, str, Caller], ToolSpec]  # arguments: name, description, caller
SkillsOf = Callable[
    [], SkillSet
]  # returns the skills of the sandbox, which is made after its tools
_TEXT = {"type": "string", "minLength": 1, "maxLength": 4000}


def actions(
    build: Build, research: Research | None, sandbox: Sandbox, skills: SkillsOf | None = None
) -> list[Tool]:
    """Return the tools by which a program acts on its run; `sandbox` reads pages."""
    looking = [_search_web(research), _read_page(research, sandbox)] if research else []
    loading = [_find_skill(skills), _load_skill(skills)] if skills else []
    return [_final_answer(), _build_tool(build), *looking, *loading]


def _final_answer() -> Tool:
    """A call of this tool is the answer: the run's record has it, so nothing else is done here."""
    spec = _spec(
        FINAL_ANSWER, "End the task with this answer.",
        {"answer": {"description": "the answer, as JSON has it"}}, ["answer"],
    )  # fmt: skip
    return Tool(spec, lambda arguments, caller: "the task is over")


def _build_tool(build: Build) -> Tool:
    spec = _spec(
        BUILD_TOOL, "Write, test and keep a new tool for a job that no tool does.",
        {"name": _TEXT, "description": _TEXT}, ["name", "description"],
    )  # fmt: skip

    def perform(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        made = build(arguments["name"], arguments["description"], caller)
        return {
            "name": made.name, "state": made.state.value, "description": made.description,
            "parameters": made.parameters.get("properties", {}),
        }  # fmt: skip

    return Tool(spec, perform)


def _search_web(research: Research) -> Tool:
    spec = _spec(
        SEARCH_WEB, "Look documents and pages up: a list with title, source and text.",
        {"query": _TEXT}, ["query"],
    )  # fmt: skip
    return Tool(spec, lambda given, caller: as_data(research.search(given["query"], caller)))


def _read_page(research: Research, sandbox: Sandbox) -> Tool:
    spec = _spec(
        READ_PAGE, "The text of a page or document that search_web found.", {"source": _TEXT},
        ["source"],
    )  # fmt: skip
    return Tool(spec, lambda given, caller: research.read(given["source"], sandbox, caller))


def _find_skill(skills: SkillsOf) -> Tool:
    spec = _spec(FIND_SKILL, "Find skills for a task.", {"query": _TEXT}, ["query"])
    return Tool(spec, lambda given, caller: skills().search(given["query"]))


def _load_skill(skills: SkillsOf) -> Tool:
    spec = _spec(
        LOAD_SKILL, "A page of the instructions of a skill, or of a text file of it.",
        {"name": _TEXT, "path": {"type": "string", "maxLength": 4000},
         "page": {"type": "integer", "minimum": 1}},
        ["name"],
    )  # fmt: skip

    def perform(given: dict[str, Any], caller: Caller) -> str:
        return skills().load_page(given["name"], given.get("path", ""), given.get("page", 1))

    return Tool(spec, perform)


def summary_tool(model_of: Callable[[Caller], Summarise]) -> Tool:
    """Return `text_summarize`, which asks the model of the run whose program calls it."""
    spec = text_summarize(lambda text, length: "").spec
    return Tool(spec, lambda given, caller: text_summarize(model_of(caller)).perform(given, caller))


def _spec(name: str, description: str, properties: dict[str, Any], required: list[str]) -> ToolSpec:
    parameters = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip
    # Idempotent: a repeated call finds the tool that was made, or the answer that was given.
    return ToolSpec(
        name=name, description=description, parameters=parameters, server=ACTIONS, idempotent=True,
        owner=ToolOwner.DEVELOPER, state=ToolState.TRUSTED,
    )  # fmt: skip


class AgentTools:
    """A catalogue of several; for equal names the first one counts."""

    def __init__(self, *catalogues: Catalogue) -> None:
        self._catalogues = catalogues

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound."""
        for each in self._catalogues:
            try:
                return each.get(name)
            except ToolNotFound:
                continue
        raise ToolNotFound(f"there is no tool {name!r}", tool=name)

    def spec_of(self, name: str) -> ToolSpec | None:
        """Return the spec of a tool that can be called; None if there is none."""
        try:
            return self.get(name).spec
        except ToolError:
            return None

    def specs(self) -> Iterable[ToolSpec]:
        """Return the specs of all, each name once."""
        found: dict[str, ToolSpec] = {}
        for catalogue in self._catalogues:
            for spec in catalogue.specs():
                found.setdefault(spec.name, spec)
        return list(found.values())

    def revision(self) -> int | None:
        """Return a number that changes with each change of the tools; None if one cannot tell."""
        found = [getattr(each, "revision", None) for each in self._catalogues]
        return None if None in found else sum(each() for each in found if each)


Events = Generator[AgentEvent, None, AgentResult]

_MOST_UNUSABLE = 6  # replies in a row
_SAME_IS_TOLD, _SAME_ENDS = 3, 5  # equal programs in a row with equal observations
_CONTEXT_SHARE = 0.7  # share of the model's context for the conversation; the rest is for its reply
_REPLAN_AFTER = 2  # programs in a row that failed
_WARN_AT = 2  # with so many steps left the model gets a warning


class AgentParts(NamedTuple):
    """State that all runs of an agent share; `instructions`: the first message to the model."""

    transcripts: Transcripts
    calls: Runs
    sandbox: Sandbox
    memory: AgentMemory
    planner: Planner | None
    tools: AgentTools
    instructions: str
    count_tokens: CountTokens


class TaskLoop:
    """One run while this process works on it; a ChatModel too, whose tokens count for the run."""

    def __init__(
        self, run: AgentRun, model: ChatModel, limits: AgentLimits, parts: AgentParts,
        on_text: OnText | None,
    ) -> None:  # fmt: skip
        self.run, self.task = run.run, run.task
        self._model, self._limits, self._parts, self._on_text = model, limits, parts, on_text
        self._store, self._calls = parts.transcripts, parts.calls
        self._conversation: Conversation
        self._session = StepSession(parts.sandbox, parts.calls, run.run)
        self._lock = threading.Lock()  # a program may have several tools built at once
        self._notes: list[str] = []  # notes of the Toolsmith
        self._used = AgentUsage()
        self._began = time.monotonic()
        self._unusable = 0  # replies in a row
        self._last: tuple[str, str] | None = None
        self._same = 1
        self._errors = 0  # programs in a row

    # a ChatModel

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        """Ask the model and count the cost; with privacy, it sees tokens in place of personal data."""
        if privacy := self._parts.sandbox.privacy:
            scope = privacy.scope(self.run)
            messages = [each._replace(text=scope.text(
                each.text, PROGRAM if each.role == "assistant" else HOST
            )) for each in messages]  # fmt: skip
        reply = self._model.ask(messages, sampling, schema=schema, on_text=on_text)
        with self._lock:
            self._used = replace(
                self._used,
                input_tokens=self._used.input_tokens + reply.input_tokens,
                output_tokens=self._used.output_tokens + reply.output_tokens,
                money=self._used.money + self._limits.cost(self.name, reply),
            )
        return reply

    def check_budget(self) -> None:
        """Raise ToolBudgetExceeded if the run must not ask for another draft of a tool.

        The step that asks is counted already, and may be the last one.
        """
        if why := self._limits.spent(replace(self._now(), steps=0)):
            raise ToolBudgetExceeded(why, "use the tools that exist, or call final_answer")

    def note(self, told: str) -> None:
        """Report the outcome of a tool's draft, after the program that asked for it."""
        with self._lock:
            self._notes.append(told)

    def tools_used(self) -> tuple[UsedTool, ...]:
        """Return the tools of the caller and the made ones that answered in this run.

        A tool that was replaced meanwhile has the digest of the called version.
        """
        used: dict[UsedTool, None] = {}
        for step in self._store.steps(self.run):
            for call in self._calls_of(step.number):
                spec = self._parts.tools.spec_of(call.tool)
                if call.state is CallState.DONE and spec and spec.server != ACTIONS:
                    used[UsedTool(call.tool, call.tool_digest)] = None
        return tuple(used)

    # the loop

    def go_on(self) -> Events:
        """Do step after step until the run is over or waits; yield events, return the outcome."""
        yield AgentEvent("started", 0, self.run)
        with self._session:
            self._begin()
            step = self._recall()
            while True:
                if (why := self._must_end()) and not step:
                    return (yield from self._end(FAILED, why))
                step = step or self._next()
                if ended := (yield from self._carry_out(step)):
                    return ended
                step = None

    def _begin(self) -> None:
        notes = self._store.notes(self.run)
        if notes is None:
            recipes = self._parts.memory.recipes_for(self.task)
            facts = self._parts.memory.facts_for(self.task)
            notes = notes_of(recipes, facts, self._planned(recipes))
            self._store.set_notes(self.run, notes)
        room = int(self.context_tokens * _CONTEXT_SHARE)
        task = task_text(self.task, notes)
        self._conversation = Conversation(
            self._parts.instructions, task, room, self._parts.count_tokens
        )

    def _planned(self, recipes: Sequence[Recipe] = (), failure: str = "") -> str:
        """Return the best plan for the task, as text; empty without a planner, or a usable plan."""
        if not (planner := self._parts.planner):
            return ""
        specs = [each for each in self._parts.tools.specs() if each.server != ACTIONS]
        best = planner.plan(self, self.task, specs, self._parts.memory, recipes, failure)
        return best.text() if best else ""

    def _recall(self) -> AgentStep | None:
        steps = self._store.steps(self.run)
        if steps:
            self._used = steps[-1].used
            self._began -= self._used.wall_seconds
            self._session.rebuild(steps)
        unfinished = steps.pop() if steps and steps[-1].observation is None else None
        for each in steps:
            self._take_in(each, each.observation or "")
        return unfinished

    def _must_end(self) -> str:
        """Return why there must be no further step; empty if there may be one."""
        if why := self._limits.spent(self._now()):
            return f"budget: {why}"
        if self._unusable >= _MOST_UNUSABLE:
            return f"model: {_MOST_UNUSABLE} unusable replies in a row"
        return "model: it repeats the same program" if self._same >= _SAME_ENDS else ""

    def _next(self) -> AgentStep:
        used = self._now()
        few = self._limits.steps - used.steps <= _WARN_AT
        note = f"Only {self._limits.left(used)}: call final_answer soon." if few else ""
        # After an unusable reply the same request would bring the same reply.
        sampling = Sampling(0.3 * self._unusable, self._unusable) if self._unusable else USUAL
        reply = self.ask(self._conversation.messages(note), sampling, on_text=self._on_text)
        number = used.steps + 1
        self._used = replace(self._used, steps=number)
        self._store.add_step(self.run, number, reply, self._now())
        return AgentStep(number, reply, None, "", self._now())

    def _carry_out(self, step: AgentStep) -> Generator[AgentEvent, None, AgentResult | None]:
        """Execute a reply and record it; return the end of the run, None if it continues."""
        match read_reply(step.reply):
            case CodeAction(_, code):
                return (yield from self._execute(step, code))
            case FinalAnswer(text):
                self._finish(step, "", ANSWER)
                return (yield from self._end(COMPLETED, "", msgspec.json.encode(text)))
            case Unusable(why):
                self._finish(step, unusable(why, is_first=self._unusable == 0), UNUSABLE)
                yield AgentEvent("unusable", step.number, why)
        return None

    def _execute(
        self, step: AgentStep, code: str
    ) -> Generator[AgentEvent, None, AgentResult | None]:
        left = self._limits.wall_seconds - self._now().wall_seconds
        if left <= 0:  # used up by the model; a resumed run with more executes the program
            return (yield from self._end(FAILED, self._must_end()))
        yield AgentEvent("program", step.number, code)
        done = self._session.execute(step.number, code, min(left, self._limits.step_seconds))
        self._count(done.result)
        for each in self._drafts():
            yield AgentEvent("tool", step.number, each)
        if not done.outcome:  # a call waits for a person
            return (yield from self._end(PAUSED, "a call waits for approval"))
        policy = self._parts.sandbox.policy
        shown = observation(done.result, policy) if done.result else ""
        self._errors = self._errors + 1 if done.outcome == ERROR else 0
        another = self._planned(failure=shown) if self._errors >= _REPLAN_AFTER else ""
        if another:
            self._errors, another = 0, f"Another plan:\n{another}"
        told = "\n\n".join(each for each in (shown, done.notice, another) if each)
        answer = self._answer(step.number)
        self._finish(step, told, ANSWER if answer is not None else done.outcome)
        if answer is not None:
            return (yield from self._end(COMPLETED, "", answer))
        yield AgentEvent("observation", step.number, told)
        return None

    def _answer(self, number: int) -> bytes | None:
        """Return the answer that a program gave, as JSON: the record has its call."""
        given = [each for each in self._calls_of(number) if each.tool == FINAL_ANSWER]
        done = [each for each in given if each.state is CallState.DONE]
        return msgspec.json.encode(done[0].arguments.get("answer")) if done else None

    def _calls_of(self, number: int) -> tuple[RunCall, ...]:
        return self._calls.calls(call_run(self.run, number))

    def _finish(self, step: AgentStep, told: str, outcome: str) -> None:
        self._store.finish_step(self.run, step.number, told, outcome, self._now())
        self._take_in(step._replace(outcome=outcome), told)

    def _take_in(self, step: AgentStep, told: str) -> None:
        action = read_reply(step.reply)
        code = action.code if isinstance(action, CodeAction) else None
        self._unusable = self._unusable + 1 if step.outcome == UNUSABLE else 0
        is_same = code is not None and (code, told) == self._last
        self._same = self._same + 1 if is_same else 1
        self._last = (code, told) if code is not None else None
        if self._same >= _SAME_IS_TOLD:
            told += (
                f"\n\nYou ran this program {self._same} times with this result. Do something else."
            )
        elif step.outcome not in (CODE, UNUSABLE, ANSWER):
            told += f"\n\n{AGAIN}"
        self._conversation.add(code, told)

    def _drafts(self) -> list[str]:
        with self._lock:
            told, self._notes = self._notes, []
            return told

    def _count(self, result: SandboxResult | None) -> None:
        if result:
            usage = result.usage
            spent = usage.cpu_user_seconds + usage.cpu_system_seconds
            with self._lock:
                self._used = replace(self._used, cpu_seconds=self._used.cpu_seconds + spent)

    def _now(self) -> AgentUsage:
        with self._lock:
            self._used = replace(self._used, wall_seconds=time.monotonic() - self._began)
            return self._used

    def _end(self, status: str, reason: str, answer: bytes = b"null") -> Events:
        self._store.end(self.run, status, reason, answer)
        waiting = () if status != PAUSED else tuple(
            each for each in self._calls.pending() if run_of(each.run) == self.run
        )  # fmt: skip
        yield AgentEvent(status, self._used.steps, reason)
        value = msgspec.json.decode(answer)
        return AgentResult(self.run, status, value, reason, self._now(), waiting)

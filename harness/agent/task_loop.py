"""`TaskLoop`: one run of an agent while this process works on it.

One step: ask the model, record its reply, run its program, record what came of it.  Whatever ends the
process, the next one goes on at the step that was being made, and calls nothing twice.
"""

import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...policies.errors import ToolBudgetExceeded
from ...runner.result import SandboxResult
from ..privacy.naming import HOST, PROGRAM
from ..runs.durable_runs import CallState, RunCall, Runs
from ..sandbox.sandbox import Sandbox
from .actions import ACTIONS, FINAL_ANSWER, AgentTools
from .conversation import Conversation
from .limits import AgentLimits, AgentUsage
from .memory import AgentMemory, Recipe, UsedTool
from .messages import USUAL, ChatModel, CountTokens, Message, ModelReply, OnText, Sampling
from .outcome import AgentEvent, AgentResult
from .planner import Planner
from .prompts import AGAIN, notes_of, observation, task_text, unusable
from .reply import CodeAction, FinalAnswer, Unusable, read_reply
from .step_session import ANSWER, CODE, ERROR, UNUSABLE, StepSession, call_run, run_of
from .transcript import COMPLETED, FAILED, PAUSED, AgentRun, AgentStep, Transcripts

Events = Generator[AgentEvent, None, AgentResult]

_MOST_UNUSABLE = 6  # replies in a row
_SAME_IS_TOLD, _SAME_ENDS = 3, 5  # equal programs in a row with equal observations
_CONTEXT_SHARE = 0.7  # of the model's context for the conversation; the rest is for its reply
_REPLAN_AFTER = 2  # programs in a row that failed
_WARN_AT = 2  # steps that are left when the model is told so


class AgentParts(NamedTuple):
    """What all runs of an agent share; `instructions` are the first message to the model."""

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
        self._notes: list[str] = []  # of the Toolsmith
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
        """Ask the model, and count what it costs; with privacy, it sees tokens for personal data."""
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
        """Tell what came of the draft of a tool, after the program that asked for it."""
        with self._lock:
            self._notes.append(told)

    def tools_used(self) -> tuple[UsedTool, ...]:
        """Return the tools of the caller and the made ones that answered in this run.

        A tool that was replaced meanwhile is named with the digest of what was called.
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
        """Do step after step until the run is over or waits; yield what happens, return the outcome."""
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
        """Begin the conversation, with what is known beside the task."""
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
        """Take in what is on record; return the step that was begun and not finished."""
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
        """Ask the model for the next step, and record its reply."""
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
        """Do what a reply asks for and record it; return how the run ends, None if it goes on."""
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
        if left <= 0:  # the model took it; the program is executed if the run is resumed with more
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
        """Return the recorded calls of a step; none if it had no program."""
        return self._calls.calls(call_run(self.run, number))

    def _finish(self, step: AgentStep, told: str, outcome: str) -> None:
        self._store.finish_step(self.run, step.number, told, outcome, self._now())
        self._take_in(step._replace(outcome=outcome), told)

    def _take_in(self, step: AgentStep, told: str) -> None:
        """Add a finished step to the conversation, and count what repeats."""
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

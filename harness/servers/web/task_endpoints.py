"""Tasks of agents: a model that works in cells, with answers at the end or as events of AG-UI 1.0.

An agent and its tasks belong to one client.  A task whose client disconnects is interrupted after the
program at work, and can be resumed.  As events, each program is a call of the tool `run_program`, and
its observation the result.  A run that waits for a person ends with the outcome `interrupt`, and goes
on by a request with `resume`.
"""

import datetime
import select
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import anyio
import msgspec

from ....policies.errors import BudgetExceeded
from ...agent.agent import Agent
from ...agent.transcript import COMPLETED, PAUSED, AgentEvent, AgentResult, AgentRun, run_of
from ...runs.run_store import Approval
from ...sandbox.calls.background import Background, Chunks, Output
from ...text.terminal_text import harmless
from ...tools.approval import digest
from ..http_access import run_in_thread
from . import web_messages as web
from .endpoint import (
    Endpoint,
    Problem,
    RequestRefused,
    ServerEvent,
    WebCall,
    encoded_json,
    problem_of,
)
from .tool_endpoints import approval_answer, decide_on

_EVENT, _NO = "event", "the person did not say yes"
Tell = Callable[[object], None]


def start_task(call: WebCall) -> web.TaskAnswer:
    """Have the agent work on a task until it is over or waits for a person."""
    check = _ends_with(call.stop)
    return _answer(_agent(call).run(call.body.task, on_event=check, on_text=check))


def resume_task(call: WebCall) -> web.TaskAnswer:
    """Go on with a task that was interrupted, or whose calls were decided on."""
    check = _ends_with(call.stop)
    return _answer(_agent(call).resume(_own(call), on_event=check, on_text=check))


def list_tasks(call: WebCall) -> web.TasksAnswer:
    """List the client's tasks."""
    return web.TasksAnswer(tasks=[_state(each) for each in _agent(call).runs()])


def show_task(call: WebCall) -> web.TaskRecordAnswer:
    """Return a task with its steps."""
    agent, task = _agent(call), _own(call)
    run, steps = agent.show(task)
    return web.TaskRecordAnswer(
        task=_state(run),
        steps=[
            web.TaskStepAnswer(
                number=each.number, reply=each.reply.text, observation=each.observation or "",
                outcome=each.outcome,
            )
            for each in steps
        ],
        approvals=[approval_answer(each) for each in agent.pending(task)],
    )  # fmt: skip


async def stream_task(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Work on a task, or go on with one, and send the events of AG-UI."""
    asked: web.RunAgentInput = call.body
    agent = await run_in_thread(_agent, call)
    work = await run_in_thread(_work_of, call, agent)
    chunks = Chunks()

    def carry_out(cancel: int) -> None:
        check = _ends_with(cancel)
        events = AguiEvents(
            asked.thread_id, asked.run_id, lambda event: chunks.put(_EVENT, encoded_json(event))
        )
        events.started()
        try:
            events.ended(work(_both(check, events.on_event), _both(check, events.on_text)))
        except Exception as error:  # noqa: BLE001 - told to the client
            events.failed(problem_of(error))

    background = Background("cellwright-task", carry_out, chunks.end)
    try:
        async for _, data in Output(chunks):
            yield ServerEvent("", data)
    finally:
        background.cancel()
        chunks.abandon()
        with anyio.CancelScope(shield=True):
            await chunks.wait_for_end()  # counts as an execution until then


def _work_of(call: WebCall, agent: Agent) -> Callable[[Tell, Tell], AgentResult]:
    """Return the task of a request: a new one, or one that continues after decisions about its
    calls; raises RequestRefused."""
    asked: web.RunAgentInput = call.body
    if not asked.resume:
        task = task_of(asked.messages)
        if not task.strip():
            raise RequestRefused(422, "invalid", "messages: the last one of the user has no text")
        return lambda tell, on_text: agent.run(task, on_event=tell, on_text=on_text)
    if not call.is_operator:
        raise RequestRefused(403, "denied", "resume: only operators decide on calls")
    pending = {each.approval: each for each in agent.pending()}
    found = [pending.get(each.interrupt_id) for each in asked.resume]
    tasks = {run_of(each.run) if each else "" for each in found}
    if (
        len(tasks) != 1
        or "" in tasks
        or len({each.interrupt_id for each in asked.resume}) < len(found)
    ):
        raise RequestRefused(409, "conflict", "resume: no call of one task waits for these answers")
    for each in asked.resume:
        call_waiting = pending[each.interrupt_id]
        shown = digest(call_waiting.tool, call_waiting.arguments)
        yes = is_yes(each.status, each.payload)
        decide_on(call, agent.calls, call_waiting, approve=yes, shown=shown, why=_NO)
    (run,) = tasks
    return lambda tell, on_text: agent.resume(run, on_event=tell, on_text=on_text)


def _ends_with(stop: int) -> Tell:
    def check(_: object) -> None:
        if select.select([stop], [], [], 0)[0]:
            raise BudgetExceeded("the client has disconnected", cause="cancelled")

    return check


def _both(first: Tell, second: Callable[..., None]) -> Tell:
    def tell(told: object) -> None:
        first(told)
        second(told)

    return tell


def _agent(call: WebCall) -> Agent:
    if call.state.agents is None:
        hint = "its owner names a model by --model"
        raise RequestRefused(404, "not_found", "this server has no agent", hint)
    return call.state.agents.of(call.client)


def _own(call: WebCall) -> str:
    task = call.path["task"]
    if not any(each.run == task for each in _agent(call).runs()):
        raise RequestRefused(404, "not_found", "no such task")
    return task


def _answer(result: AgentResult) -> web.TaskAnswer:
    return web.TaskAnswer(
        task=result.run_id, status=result.status, answer=result.answer, reason=result.reason,
        steps=result.usage.steps, input_tokens=result.usage.input_tokens,
        output_tokens=result.usage.output_tokens,
        approvals=[approval_answer(each) for each in result.pending],
    )  # fmt: skip


def _state(run: AgentRun) -> web.TaskStateAnswer:
    return web.TaskStateAnswer(
        task=run.run, text=run.task, model=run.model, began=run.began, state=run.state,
        reason=run.reason, answer=run.answer,
    )  # fmt: skip


_ONE = "/v1/tasks/{task}"
TASK_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/tasks", "Have the agent work on a task.", web.TaskAnswer, web.TaskBody,
        handler=start_task, executes=True, status=201,
    ),
    Endpoint(
        "POST", "/v1/tasks/stream", "Work on a task, or resume one, as a stream of AG-UI events.",
        takes=web.RunAgentInput, stream=stream_task, executes=True,
    ),
    Endpoint("GET", "/v1/tasks", "List your tasks.", web.TasksAnswer, handler=list_tasks),
    Endpoint("GET", _ONE, "Return a task with its steps.", web.TaskRecordAnswer, handler=show_task),
    Endpoint(
        "POST", f"{_ONE}/resume", "Go on with a task.", web.TaskAnswer, handler=resume_task,
        executes=True,
    ),
)  # fmt: skip


VERSION = "1.0"
PROGRAM = "run_program"
_YES = "approve"
_SCHEMA = {"type": "object", "properties": {_YES: {"type": "boolean"}}, "required": [_YES]}


class AguiEvents:
    """Translates an agent's events; `tell` gets each event of the protocol."""

    def __init__(self, thread: str, run: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._ids = {"threadId": thread, "runId": run}
        self._run = run
        self._tell_event = tell
        self._messages = 0
        self._message = ""  # id of the open message
        self._program = ""  # id of the program whose result is missing

    def started(self) -> None:
        """Tell that the run has begun."""
        self._tell("RUN_STARTED", **self._ids, protocolVersion=VERSION)

    def on_text(self, text: str) -> None:
        """Tell a piece of the model's reply."""
        if not text:
            return
        if not self._message:
            self._message = self._next_message()
            self._tell("TEXT_MESSAGE_START", messageId=self._message, role="assistant")
        self._tell("TEXT_MESSAGE_CONTENT", messageId=self._message, delta=text)

    def on_event(self, event: AgentEvent) -> None:
        """Tell what happened in the run."""
        self._end_message()
        match event.kind:
            case "program":
                self._program = call = f"{self._run}-{event.step}"
                code = msgspec.json.encode({"code": event.text}).decode()
                self._tell("TOOL_CALL_START", toolCallId=call, toolCallName=PROGRAM)
                self._tell("TOOL_CALL_ARGS", toolCallId=call, delta=code)
                self._tell("TOOL_CALL_END", toolCallId=call)
            case "observation":
                self._end_program(event.text)
            case "unusable" | "tool":
                self._tell("CUSTOM", name=f"cellwright.{event.kind}", value=event.text)

    def ended(self, result: AgentResult) -> None:
        """Tell how the run ended."""
        self._end_message()
        if result.status == PAUSED:
            interrupts = [self._interrupt(each) for each in result.pending]
            self._finish({"type": "interrupt", "interrupts": interrupts}, {"task": result.run_id})
            return
        self._end_program("")  # without a result the client would have to make the call itself
        if result.status == COMPLETED:
            self.on_text(_text_of(result.answer))
            self._end_message()
            self._finish({"type": "success"}, {"task": result.run_id, "answer": result.answer})
        else:
            self._tell("RUN_ERROR", message=result.reason or result.status, code=result.status)

    def failed(self, problem: Problem) -> None:
        """Tell that the server could not go on."""
        self._end_message()
        self._tell("RUN_ERROR", message=problem.detail, code=problem.title)

    def _interrupt(self, waiting: Approval) -> dict[str, Any]:
        about = approval_answer(waiting)
        expires = datetime.datetime.fromtimestamp(waiting.expires, datetime.UTC)
        metadata = {"tool": about.tool, "arguments": about.arguments, "digest": about.digest}
        return {
            "id": waiting.approval, "reason": "approval", "toolCallId": self._program,
            "message": f"Call the tool {harmless(about.tool)!r}, once?\n{about.shown}",
            "responseSchema": _SCHEMA, "expiresAt": expires.isoformat(), "metadata": metadata,
        }  # fmt: skip

    def _finish(self, outcome: dict[str, Any], result: dict[str, Any]) -> None:
        self._tell("RUN_FINISHED", **self._ids, outcome=outcome, result=result)

    def _end_program(self, observation: str) -> None:
        call, self._program = self._program, ""
        if call:
            message = self._next_message()
            about = {"messageId": message, "toolCallId": call, "role": "tool"}
            self._tell("TOOL_CALL_RESULT", **about, content=observation)

    def _end_message(self) -> None:
        message, self._message = self._message, ""
        if message:
            self._tell("TEXT_MESSAGE_END", messageId=message)

    def _next_message(self) -> str:
        self._messages += 1
        return f"{self._run}-message-{self._messages}"

    def _tell(self, type: str, **fields: Any) -> None:
        self._tell_event({"type": type, **fields})


def task_of(messages: Iterable[dict[str, Any]]) -> str:
    """Return the text of the last message of the user, empty without one."""
    texts = [_content(each.get("content")) for each in messages if each.get("role") == "user"]
    return texts[-1] if texts else ""


def is_yes(status: str, payload: object) -> bool:
    """Tell whether the answer to an interrupt approves the call."""
    return status == "resolved" and isinstance(payload, dict) and payload.get(_YES) is True


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(each.get("text", "")) for each in parts if isinstance(each, dict))


def _text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()

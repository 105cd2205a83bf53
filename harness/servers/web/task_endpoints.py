"""Tasks of agents: a model that works in cells, with answers at the end or as events of AG-UI.

An agent and its tasks belong to one client.  A task whose client disconnects is interrupted after the
program at work, and can be resumed.
"""

import select
from collections.abc import AsyncIterator, Callable

import anyio

from ....policies.errors import BudgetExceeded
from ...agent.agent import Agent
from ...agent.outcome import AgentResult
from ...agent.step_session import run_of
from ...agent.transcript import AgentRun
from ...sandbox.background import Background
from ...sandbox.run import Chunks, Output
from ...tools.approval import digest
from ..client_turns import run_in_thread
from .agui import AguiEvents, is_yes, task_of
from .approval_endpoints import approval_answer, decide_on
from .encoding import encoded_json
from .endpoint import Endpoint, ServerEvent, WebCall
from .messages import (
    RunAgentInput,
    TaskAnswer,
    TaskBody,
    TaskRecordAnswer,
    TasksAnswer,
    TaskStateAnswer,
    TaskStepAnswer,
)
from .problems import RequestRefused, problem_of

_EVENT, _NO = "event", "the person did not say yes"
Tell = Callable[[object], None]


def start_task(call: WebCall) -> TaskAnswer:
    """Have the agent work on a task until it is over or waits for a person."""
    check = _ends_with(call.stop)
    return _answer(_agent(call).run(call.body.task, on_event=check, on_text=check))


def resume_task(call: WebCall) -> TaskAnswer:
    """Go on with a task that was interrupted, or whose calls were decided on."""
    check = _ends_with(call.stop)
    return _answer(_agent(call).resume(_own(call), on_event=check, on_text=check))


def list_tasks(call: WebCall) -> TasksAnswer:
    """List the client's tasks."""
    return TasksAnswer(tasks=[_state(each) for each in _agent(call).runs()])


def show_task(call: WebCall) -> TaskRecordAnswer:
    """Return a task with its steps."""
    agent, task = _agent(call), _own(call)
    run, steps = agent.show(task)
    return TaskRecordAnswer(
        task=_state(run),
        steps=[
            TaskStepAnswer(
                number=each.number, reply=each.reply.text, observation=each.observation or "",
                outcome=each.outcome,
            )
            for each in steps
        ],
        approvals=[approval_answer(each) for each in agent.pending(task)],
    )  # fmt: skip


async def stream_task(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Work on a task, or go on with one, and send the events of AG-UI."""
    asked: RunAgentInput = call.body
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
            await chunks.wait_for_end()  # it counts as an execution until then


def _work_of(call: WebCall, agent: Agent) -> Callable[[Tell, Tell], AgentResult]:
    """Return what a request asks for: a new task, or to go on with one after its calls were decided
    on; raises RequestRefused."""
    asked: RunAgentInput = call.body
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
    """Return a callback that ends a task once `stop` is readable."""

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


def _answer(result: AgentResult) -> TaskAnswer:
    return TaskAnswer(
        task=result.run_id, status=result.status, answer=result.answer, reason=result.reason,
        steps=result.usage.steps, input_tokens=result.usage.input_tokens,
        output_tokens=result.usage.output_tokens,
        approvals=[approval_answer(each) for each in result.pending],
    )  # fmt: skip


def _state(run: AgentRun) -> TaskStateAnswer:
    return TaskStateAnswer(
        task=run.run, text=run.task, model=run.model, began=run.began, state=run.state,
        reason=run.reason, answer=run.answer,
    )  # fmt: skip


_ONE = "/v1/tasks/{task}"
TASK_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/tasks", "Have the agent work on a task.", TaskAnswer, TaskBody,
        handler=start_task, executes=True, status=201,
    ),
    Endpoint(
        "POST", "/v1/tasks/stream", "Work on a task, or resume one, as a stream of AG-UI events.",
        takes=RunAgentInput, stream=stream_task, executes=True,
    ),
    Endpoint("GET", "/v1/tasks", "List your tasks.", TasksAnswer, handler=list_tasks),
    Endpoint("GET", _ONE, "Return a task with its steps.", TaskRecordAnswer, handler=show_task),
    Endpoint(
        "POST", f"{_ONE}/resume", "Go on with a task.", TaskAnswer, handler=resume_task,
        executes=True,
    ),
)  # fmt: skip

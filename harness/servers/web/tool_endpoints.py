"""Tools and skills: find, describe, call and make them.  Durable runs: programs whose risky calls wait
for a person; and the approvals of these calls.

The id of a run begins with the name of its client, so the file of runs says whose each one is, and
another process of the server knows it, too.  Only operators decide on a call: a program with a token
of its own must not approve its own calls.
"""

import os
from typing import NamedTuple

from ....policies.errors import ApprovalRequired, QuotaExceeded, SkillNotFound
from ....runner.audit.record import span_of
from ....runner.concurrency import CANCEL
from ...runs.durable_runs import RunAttempt, Runs
from ...runs.run_store import Approval, RunSummary
from ...schemas.spec import ToolSpec
from ...text.terminal_text import presented_whole
from ...tools.approval import Approve, asking, digest, refusing
from ..served_requests import CancellableExecuting, plain
from ..services import shown_parameters
from . import web_messages as web
from .endpoint import ContentAnswer, Endpoint, RequestRefused, WebCall
from .execution_endpoints import given_of


def approver(runs: Runs) -> Approve:
    """Return the `approve` callback of a broker: a call waits if its program is a durable run."""
    hint = "start the program as a run: POST /v1/runs"
    return asking(runs.ask, refusing("and this call cannot wait", hint))


def start_run(call: WebCall) -> web.RunAnswer:
    """Start a program as a run; it ends early, as `pending`, when a call waits for approval."""
    sandbox = call.state.services.of(call.client).sandbox
    given = given_of(call, sandbox.policy)
    executing = CancellableExecuting(sandbox, call.stop)
    own = f"{call.client}{SEPARATOR}"
    _check_room(call, own)
    run = f"{own}{os.urandom(8).hex()}"
    return _answer(call, call.state.runs.finish(executing, run, given))


def _check_room(call: WebCall, own: str) -> None:
    """Raise QuotaExceeded if a client has too many runs: their records stay until somebody removes
    them."""
    limits = call.state.limits
    number, size = call.state.runs.size_of(own)
    if number >= limits.runs_of_one or size >= limits.run_bytes_of_one:
        most = f"{limits.runs_of_one} and {limits.run_bytes_of_one} bytes of one client"
        hint = "remove one that is over: DELETE /v1/runs/{run}"
        raise QuotaExceeded(f"too many recorded runs: at most {most}", hint, limit="runs")


def resume_run(call: WebCall) -> web.RunAnswer:
    """Execute a run again with the recorded answers, after its calls were decided on."""
    run = _own(call)
    client = owner_of_run(run)
    executing = CancellableExecuting(call.state.services.of(client).sandbox, call.stop)
    return _answer(call, call.state.runs.resume(executing, run))


def list_runs(call: WebCall) -> web.RunsAnswer:
    """List the client's runs; an operator sees those of all clients."""
    return web.RunsAnswer(
        runs=[_state(each) for each in call.state.runs.kept() if _may_see(call, each.run)]
    )


def show_run(call: WebCall) -> web.RunRecordAnswer:
    """Return a run with its calls and the approvals that it waits for."""
    record = call.state.runs.show(_own(call))
    return web.RunRecordAnswer(
        run=_state(record.run),
        calls=[
            web.RunCallAnswer(
                number=each.number, tool=each.tool, arguments=each.arguments,
                state=each.state.value, answer=each.answer,
            )
            for each in record.calls
        ],
        approvals=[approval_answer(each) for each in record.approvals],
        actions=record.actions,
    )  # fmt: skip


def forget_run(call: WebCall) -> None:
    """Remove the record of a run."""
    call.state.runs.forget(_own(call))


def _own(call: WebCall) -> str:
    """Return the run of the path; another client's does not exist for this one."""
    run = call.path["run"]
    if not _may_see(call, run) or not any(each.run == run for each in call.state.runs.kept()):
        raise RequestRefused(404, "not_found", "no such run")
    return run


def _may_see(call: WebCall, run: str) -> bool:
    return call.is_operator or owner_of_run(run) == call.client


def _answer(call: WebCall, attempt: RunAttempt) -> web.RunAnswer:
    waiting = [each for each in call.state.runs.pending() if each.run == attempt.run]
    return web.RunAnswer(
        run=attempt.run, status=attempt.result.status.value,
        result=web.execution_answer(attempt.result.for_model()),
        approvals=[approval_answer(each) for each in waiting],
        not_called_again=attempt.unused,
    )  # fmt: skip


def _state(run: RunSummary) -> web.RunStateAnswer:
    return web.RunStateAnswer(
        run=run.run, client=owner_of_run(run.run), state=run.state, began=run.began,
        language=run.language, ending=run.ending,
    )  # fmt: skip


_ONE = "/v1/runs/{run}"
RUN_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/runs", "Start a program whose risky calls wait for a person.", web.RunAnswer,
        web.ExecuteBody, handler=start_run, executes=True, status=201,
    ),
    Endpoint("GET", "/v1/runs", "List the runs.", web.RunsAnswer, handler=list_runs),
    Endpoint(
        "GET", _ONE, "Return a run with its calls and approvals.", web.RunRecordAnswer, handler=show_run
    ),
    Endpoint(
        "POST", f"{_ONE}/resume", "Go on with a run whose calls were decided on.", web.RunAnswer,
        handler=resume_run, executes=True,
    ),
    Endpoint("DELETE", _ONE, "Remove the record of a run.", handler=forget_run, status=204),
)  # fmt: skip


SEPARATOR = "~"


class OwnedApproval(NamedTuple):
    """A call that waits, its client, and where it is recorded."""

    waiting: Approval
    client: str
    runs: Runs


def owner_of_run(run: str) -> str:
    """Return the name of the client in the id of a run."""
    return run.rpartition(SEPARATOR)[0]


def list_approvals(call: WebCall) -> web.ApprovalsAnswer:
    """List the calls that wait: the client's own, and for an operator those of all clients."""
    found = [approval_answer(each.waiting, each.client) for each in visible_approvals(call)]
    return web.ApprovalsAnswer(approvals=found)


def decide(call: WebCall) -> web.DecisionAnswer:
    """Approve or reject a call; `digest` says which arguments the person saw."""
    body: web.DecisionBody = call.body
    id = call.path["approval"]
    found = [each for each in visible_approvals(call) if each.waiting.approval == id]
    if not found:
        raise RequestRefused(404, "not_found", "this call does not wait any more")
    ((waiting, _, runs),) = found
    if body.digest != digest(waiting.tool, waiting.arguments):
        raise RequestRefused(409, "conflict", "digest: the call that waits is another one")
    decide_on(call, runs, waiting, approve=body.approve, shown=body.digest, why=body.reason)
    return web.DecisionAnswer(approval=waiting.approval, approved=body.approve, run=waiting.run)


def decide_on(
    call: WebCall, runs: Runs, waiting: Approval, *, approve: bool, shown: str, why: str
) -> None:
    """Record a decision in the trail, and then make it hold; raises RequestRefused if it comes too
    late, and ApprovalRequired to approve a call that cannot be shown whole.  `shown` is the hash of
    what the person saw."""
    id = waiting.approval
    if approve:
        presented_whole(waiting.tool, waiting.arguments)
    if audit := call.state.services.ceiling.audit:
        audit.record(
            "approval", "approved" if approve else "rejected", target=waiting.tool, by=call.client,
            run=waiting.run, approval=id, shown=shown, why=why,
        )  # fmt: skip
    if not (runs.approve(id) if approve else runs.reject(id, why)):
        raise RequestRefused(409, "conflict", "another decision was first, or it came too late")


def approval_answer(waiting: Approval, client: str = "") -> web.ApprovalAnswer:
    """Return a call that waits; `shown` is for a person, with nothing hidden."""
    try:
        shown = presented_whole(waiting.tool, waiting.arguments)
    except ApprovalRequired as error:  # the call was recorded by another program under other rules
        shown = str(error)
    return web.ApprovalAnswer(
        approval=waiting.approval, run=waiting.run, client=client or owner_of_run(waiting.run),
        tool=waiting.tool, arguments=waiting.arguments, shown=shown,
        digest=digest(waiting.tool, waiting.arguments), description=waiting.description,
        reason=waiting.reason, asked=waiting.asked, expires=waiting.expires,
    )  # fmt: skip


def visible_approvals(call: WebCall) -> list[OwnedApproval]:
    """Return the calls of runs and of agents that wait, as far as the client may see them."""
    state = call.state
    found = [
        OwnedApproval(each, owner_of_run(each.run), state.runs) for each in state.runs.pending()
    ]
    for client, agent in state.agents.made().items() if state.agents else ():
        found += [OwnedApproval(each, client, agent.calls) for each in agent.pending()]
    return [each for each in found if call.is_operator or each.client == call.client]


APPROVAL_ENDPOINTS = (
    Endpoint(
        "GET", "/v1/approvals", "List the calls that wait for a person.", web.ApprovalsAnswer,
        handler=list_approvals,
    ),
    Endpoint(
        "POST", "/v1/approvals/{approval}", "Approve or reject a call, as an operator.",
        web.DecisionAnswer, web.DecisionBody, handler=decide, needs_operator=True,
    ),
)  # fmt: skip


_LINE = 200  # characters of a description in a list


def list_tools(call: WebCall) -> web.ToolsAnswer:
    """Find tools by their purpose; without a query list all callable tools."""
    asked: web.ToolQuery = call.query
    services = call.state.services.of(call.client)
    if not asked.query:
        specs = [*services.catalogue.specs()]
        shown = [_summary(each.name, each.description) for each in specs[: asked.limit]]
        return web.ToolsAnswer(tools=shown, more=len(specs) > len(shown))
    found = services.search(asked.query, asked.limit)
    tools = [
        _summary(each["name"], each.get("summary", ""))
        for each in found["tools"] if each.get("kind") != "skill"
    ]  # fmt: skip
    return web.ToolsAnswer(tools=tools, more=found["more"], hint=found.get("hint", ""))


def show_tool(call: WebCall) -> web.ToolDescription:
    """Return the parameters and the result of a tool."""
    return _about(call.state.services.of(call.client).catalogue.get(call.path["tool"]).spec)


def call_tool(call: WebCall) -> web.ToolResultAnswer:
    """Call a tool; a risky one must be called by a program of a run, which can wait for a person."""
    body: web.CallToolBody = call.body
    services = call.state.services.of(call.client)
    token = CANCEL.set(call.stop)
    try:
        caller = services.caller(call.client, span_of(call.traceparent or None).traceparent or "")
        value = services.broker.call(call.path["tool"], body.arguments, caller)
    finally:
        CANCEL.reset(token)
    return web.ToolResultAnswer(result=plain(value))


def create_tool(call: WebCall) -> web.ToolDescription:
    """Test Python source in a cell and keep it as a tool, with no more rights than every cell."""
    body: web.CreateToolBody = call.body
    spec = call.state.services.of(call.client).factory.create_tool(
        body.name, body.description, body.source_code, tests=body.tests, calls=body.calls,
        requirements=body.requirements, allow_similar=body.allow_similar,
    )  # fmt: skip
    return _about(spec)


def list_skills(call: WebCall) -> web.SkillsAnswer:
    """List the skills that programs see below /skills."""
    if call.state.services.skills is None:
        return web.SkillsAnswer(skills=[])
    skills = call.state.services.of(call.client).sandbox.skills
    return web.SkillsAnswer(
        skills=[
            web.SkillSummary(name=each.name, description=each.description)
            for each in skills.usable()
        ]
    )


def show_skill(call: WebCall) -> web.SkillAnswer:
    """Return the instructions of a skill, labelled as untrusted text for a model."""
    name = call.path["skill"]
    _require_skills(call)
    text = call.state.services.of(call.client).sandbox.skills.load(name)
    return web.SkillAnswer(name=name, text=text)


def skill_file(call: WebCall) -> ContentAnswer:
    """Return a file of a skill."""
    _require_skills(call)
    path = call.path["file"]
    skills = call.state.services.of(call.client).sandbox.skills
    return ContentAnswer(skills.read(call.path["skill"], path), path)


def _require_skills(call: WebCall) -> None:
    if call.state.services.skills is None:
        raise SkillNotFound("this server offers no skills", "its owner adds them by --skills")


def _summary(name: str, description: str) -> web.ToolSummary:
    return web.ToolSummary(name=name, summary=description.partition("\n")[0][:_LINE])


def _about(spec: ToolSpec) -> web.ToolDescription:
    return web.ToolDescription(
        name=spec.name, description=spec.description, parameters=shown_parameters(spec),
        result=spec.output_schema or {}, risky=spec.risky, owner=spec.owner.value,
        state=spec.state.value, version=spec.version,
    )  # fmt: skip


TOOL_ENDPOINTS = (
    Endpoint(
        "GET", "/v1/tools", "Find tools by what they do, or list them.", web.ToolsAnswer,
        query=web.ToolQuery, handler=list_tools,
    ),
    Endpoint(
        "POST", "/v1/tools", "Test Python source in a cell, and keep it as a tool.",
        web.ToolDescription, web.CreateToolBody, handler=create_tool, status=201, executes=True,
    ),
    Endpoint("GET", "/v1/tools/{tool}", "Describe a tool.", web.ToolDescription, handler=show_tool),
    Endpoint(
        "POST", "/v1/tools/{tool}/calls", "Call a tool.", web.ToolResultAnswer, web.CallToolBody,
        handler=call_tool, executes=True,
    ),
    Endpoint("GET", "/v1/skills", "List the skills.", web.SkillsAnswer, handler=list_skills),
    Endpoint(
        "GET", "/v1/skills/{skill}", "Return the instructions of a skill.", web.SkillAnswer,
        handler=show_skill,
    ),
    Endpoint(
        "GET", "/v1/skills/{skill}/files/{file:path}", "Return a file of a skill.", bytes,
        handler=skill_file,
    ),
)  # fmt: skip

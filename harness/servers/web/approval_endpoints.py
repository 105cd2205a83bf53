"""Approvals: the calls that wait for a person, with exactly the arguments that each will have.

Only operators decide: a program with a token of its own must not approve its own calls.
"""

from typing import NamedTuple

from ....policies.errors import ApprovalRequired
from ...runs.durable_runs import Runs
from ...runs.store import Approval
from ...text.presentation import presented_whole
from ...tools.approval import digest
from .endpoint import Endpoint, WebCall
from .messages import ApprovalAnswer, ApprovalsAnswer, DecisionAnswer, DecisionBody
from .problems import RequestRefused

SEPARATOR = "~"


class OwnedApproval(NamedTuple):
    """A call that waits, its client, and where it is recorded."""

    waiting: Approval
    client: str
    runs: Runs


def owner_of_run(run: str) -> str:
    """Return the name of the client in the id of a run."""
    return run.rpartition(SEPARATOR)[0]


def list_approvals(call: WebCall) -> ApprovalsAnswer:
    """List the calls that wait: the client's own, and for an operator those of all clients."""
    found = [approval_answer(each.waiting, each.client) for each in visible_approvals(call)]
    return ApprovalsAnswer(approvals=found)


def decide(call: WebCall) -> DecisionAnswer:
    """Approve or reject a call; `digest` says which arguments the person saw."""
    body: DecisionBody = call.body
    id = call.path["approval"]
    found = [each for each in visible_approvals(call) if each.waiting.approval == id]
    if not found:
        raise RequestRefused(404, "not_found", "this call does not wait any more")
    ((waiting, _, runs),) = found
    if body.digest != digest(waiting.tool, waiting.arguments):
        raise RequestRefused(409, "conflict", "digest: the call that waits is another one")
    decide_on(call, runs, waiting, approve=body.approve, shown=body.digest, why=body.reason)
    return DecisionAnswer(approval=waiting.approval, approved=body.approve, run=waiting.run)


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


def approval_answer(waiting: Approval, client: str = "") -> ApprovalAnswer:
    """Return a call that waits; `shown` is for a person, with nothing hidden."""
    try:
        shown = presented_whole(waiting.tool, waiting.arguments)
    except ApprovalRequired as error:  # recorded by another program, under other rules
        shown = str(error)
    return ApprovalAnswer(
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
    for client, agent in state.agents.opened().items() if state.agents else ():
        found += [OwnedApproval(each, client, agent.calls) for each in agent.pending()]
    return [each for each in found if call.is_operator or each.client == call.client]


APPROVAL_ENDPOINTS = (
    Endpoint(
        "GET", "/v1/approvals", "List the calls that wait for a person.", ApprovalsAnswer,
        handler=list_approvals,
    ),
    Endpoint(
        "POST", "/v1/approvals/{approval}", "Approve or reject a call, as an operator.",
        DecisionAnswer, DecisionBody, handler=decide, needs_operator=True,
    ),
)  # fmt: skip

"""Approvals: the calls that wait for a person, with exactly the arguments that each will have.

Only operators decide: a program with a token of its own must not approve its own calls.
"""

from ....policies.errors import ApprovalRequired
from ...runs.store import Approval
from ...text.presentation import presented_whole
from ...tools.approval import digest
from .endpoint import Endpoint, WebCall
from .messages import ApprovalAnswer, ApprovalsAnswer, DecisionAnswer, DecisionBody
from .problems import RequestRefused

_SEPARATOR = "~"


def owner_of_run(run: str) -> str:
    """Return the name of the client in the id of a run."""
    return run.rpartition(_SEPARATOR)[0]


def list_approvals(call: WebCall) -> ApprovalsAnswer:
    """List the calls that wait: the client's own, and for an operator those of all clients."""
    return ApprovalsAnswer(approvals=[approval_answer(each) for each in _visible(call)])


def decide(call: WebCall) -> DecisionAnswer:
    """Approve or reject a call; `digest` says which arguments the person saw."""
    body: DecisionBody = call.body
    found = [each for each in _visible(call) if each.approval == call.path["approval"]]
    if not found:
        raise RequestRefused(404, "not_found", "no call waits under this name any more")
    (waiting,) = found
    if body.digest != digest(waiting.tool, waiting.arguments):
        raise RequestRefused(409, "conflict", "digest: the call that waits is another one")
    decide_on(call, waiting, approve=body.approve, shown=body.digest, why=body.reason)
    return DecisionAnswer(approval=waiting.approval, approved=body.approve, run=waiting.run)


def decide_on(call: WebCall, waiting: Approval, *, approve: bool, shown: str, why: str) -> None:
    """Record a decision in the trail, and then make it hold; raises RequestRefused if it comes too
    late.  `shown` is the hash of what the person saw."""
    runs, id = call.state.runs, waiting.approval
    if audit := call.state.services.ceiling.audit:
        audit.record(
            "approval", "approved" if approve else "rejected", target=waiting.tool, by=call.client,
            run=waiting.run, approval=id, shown=shown, why=why,
        )  # fmt: skip
    if not (runs.approve(id) if approve else runs.reject(id, why)):
        raise RequestRefused(409, "conflict", "another decision was first, or it came too late")


def approval_answer(waiting: Approval) -> ApprovalAnswer:
    """Return a call that waits; `shown` is for a person, with nothing hidden."""
    try:
        shown = presented_whole(waiting.tool, waiting.arguments)
    except ApprovalRequired as error:  # recorded by another program, under other rules
        shown = str(error)
    return ApprovalAnswer(
        approval=waiting.approval, run=waiting.run, client=owner_of_run(waiting.run),
        tool=waiting.tool, arguments=waiting.arguments, shown=shown,
        digest=digest(waiting.tool, waiting.arguments), description=waiting.description,
        reason=waiting.reason, asked=waiting.asked, expires=waiting.expires,
    )  # fmt: skip


def _visible(call: WebCall) -> list[Approval]:
    pending = call.state.runs.pending()
    return [each for each in pending if call.is_operator or owner_of_run(each.run) == call.client]


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

"""Durable runs: programs whose risky calls wait for a person.

The id of a run begins with the name of its client, so the file of runs says whose each one is, and
another process of the server knows it, too.
"""

import os
from collections.abc import Callable

from ....policies.errors import ApprovalRequired, QuotaExceeded
from ...runs.durable_runs import RunAttempt, Runs
from ...runs.store import RunSummary
from ...text.presentation import presented_whole
from ...tools.approval import ApprovalRequest
from ..cancellable import CancellableExecuting
from .approval_endpoints import SEPARATOR, approval_answer, owner_of_run
from .endpoint import Endpoint, WebCall
from .execution_endpoints import given_of
from .messages import (
    ExecuteBody,
    RunAnswer,
    RunCallAnswer,
    RunRecordAnswer,
    RunsAnswer,
    RunStateAnswer,
    execution_answer,
)
from .problems import RequestRefused


def approver(runs: Runs) -> Callable[[ApprovalRequest], bool]:
    """Return the `approve` callback of a broker: a call waits if its program is a durable run."""

    def approve(asked: ApprovalRequest) -> bool:
        presented_whole(asked.tool, asked.arguments)
        if not asked.run:
            raise ApprovalRequired(
                f"{asked.tool} needs approval by a person, and this call cannot wait",
                "start the program as a run: POST /v1/runs",
                tool=asked.tool,
            )
        return runs.ask(asked)

    return approve


def start_run(call: WebCall) -> RunAnswer:
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


def resume_run(call: WebCall) -> RunAnswer:
    """Execute a run again with the recorded answers, after its calls were decided on."""
    run = _own(call)
    client = owner_of_run(run)
    executing = CancellableExecuting(call.state.services.of(client).sandbox, call.stop)
    return _answer(call, call.state.runs.resume(executing, run))


def list_runs(call: WebCall) -> RunsAnswer:
    """List the client's runs; an operator sees those of all clients."""
    return RunsAnswer(
        runs=[_state(each) for each in call.state.runs.kept() if _may_see(call, each.run)]
    )


def show_run(call: WebCall) -> RunRecordAnswer:
    """Return a run with its calls and the approvals that it waits for."""
    record = call.state.runs.show(_own(call))
    return RunRecordAnswer(
        run=_state(record.run),
        calls=[
            RunCallAnswer(
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


def _answer(call: WebCall, attempt: RunAttempt) -> RunAnswer:
    waiting = [each for each in call.state.runs.pending() if each.run == attempt.run]
    return RunAnswer(
        run=attempt.run, status=attempt.result.status.value,
        result=execution_answer(attempt.result.for_model()),
        approvals=[approval_answer(each) for each in waiting],
        not_called_again=attempt.unused,
    )  # fmt: skip


def _state(run: RunSummary) -> RunStateAnswer:
    return RunStateAnswer(
        run=run.run, client=owner_of_run(run.run), state=run.state, began=run.began,
        language=run.language, ending=run.ending,
    )  # fmt: skip


_ONE = "/v1/runs/{run}"
RUN_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/runs", "Start a program whose risky calls wait for a person.", RunAnswer,
        ExecuteBody, handler=start_run, executes=True, status=201,
    ),
    Endpoint("GET", "/v1/runs", "List the runs.", RunsAnswer, handler=list_runs),
    Endpoint(
        "GET", _ONE, "Return a run with its calls and approvals.", RunRecordAnswer, handler=show_run
    ),
    Endpoint(
        "POST", f"{_ONE}/resume", "Go on with a run whose calls were decided on.", RunAnswer,
        handler=resume_run, executes=True,
    ),
    Endpoint("DELETE", _ONE, "Remove the record of a run.", handler=forget_run, status=204),
)  # fmt: skip

"""Durable runs and the calls in them that wait for a person."""

from collections.abc import Callable

from ....policies.errors import ApprovalRequired
from ...runs.durable_runs import Runs
from ...text.presentation import presented_whole
from ...tools.approval import ApprovalRequest


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

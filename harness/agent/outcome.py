"""`AgentEvent` and `AgentResult`: what a run tells while it goes on, and how it ended."""

from typing import Any, NamedTuple

from ..runs.store import Approval
from .limits import AgentUsage
from .transcript import COMPLETED


class AgentEvent(NamedTuple):
    """What happened in a run: `started` (text: its id), `program`, `observation`, `unusable`,
    `paused`, `completed`, `failed`; `step` counts from 1."""

    kind: str
    step: int
    text: str


class AgentResult(NamedTuple):
    """The outcome of working on a run.

    `status`: completed, paused (a call waits for approval), or failed; `reason` says why.  `answer` is
    what the model gave as its final answer: data of a program in a cell.
    """

    run_id: str
    status: str
    answer: Any
    reason: str
    usage: AgentUsage
    pending: tuple[Approval, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == COMPLETED

"""Approvals over MCP: the person at the other end is asked before a risky call is made.

No cell lives while the person decides.  A program that makes a risky call is stopped, and runs again
with the answers that it already had once the person has decided (`Runs`); a single call has not begun
by then.  An approval is good for one version of a tool with exactly the shown arguments, once.
"""

import contextvars
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio
from mcp import MCPError, types

from ....policies.errors import ApprovalRequired, BusyError
from ...runs.durable_runs import RunPaused, Runs
from ...text.presentation import presented_whole
from ...text.terminal import harmless
from ...tools.approval import ApprovalRequest
from ...tools.caller import CALLING
from ..client_quota import ClientQuota
from .clients import Context, Owner

WAIT_SECONDS = 600.0
_PER_OWNER, _TOTAL = 16, 256  # calls that wait for approval
DECLINED = "the person did not say yes"
_YES = "approve"
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {_YES: {"type": "boolean", "title": "Make this call", "default": False}},
    "required": [_YES],
}


class ApprovalQuestion(NamedTuple):
    """A call that waits for approval; `key` identifies the answer."""

    key: str
    tool: str
    arguments: Mapping[str, Any]
    reason: str

    @property
    def message(self) -> str:
        """The text for the person, with all foreign text escaped and set apart.

        Raises ApprovalRequired for arguments that cannot be shown whole; `approver` refuses those
        before it asks.
        """
        return (
            f"Call the tool {harmless(self.tool)!r}, once?\n"
            f"{presented_whole(self.tool, self.arguments)}\n"
            f"Asked because: {harmless(self.reason)}"
        )


Verdicts = dict[str, bool]


class SingleApproval:
    """The person's decision about one single call, once asked."""

    def __init__(self) -> None:
        self.asked: ApprovalRequest | None = None
        self._approved: bool | None = None

    def answer(self, *, approved: bool) -> None:
        """Set the decision about the call that was asked about."""
        self._approved = approved

    def judge(self, asked: ApprovalRequest) -> bool:
        """Tell whether exactly this call was approved; the approval is used up.

        Raises RunPaused if the person has not been asked, ApprovalRequired if the person did not
        approve.
        """
        if self.asked is None or self.asked.digest != asked.digest or self._approved is None:
            self.asked, self._approved = asked, None
            raise RunPaused(f"{asked.tool} waits for approval", tool=asked.tool)
        if not self._approved:
            raise ApprovalRequired(f"{asked.tool}: {DECLINED}", tool=asked.tool)
        self.asked = None
        return True


SINGLE_APPROVAL: contextvars.ContextVar[SingleApproval | None] = contextvars.ContextVar(
    "approval", default=None
)


def approver(runs: Runs) -> Callable[[ApprovalRequest], bool]:
    """Return the `approve` callback of a broker: it asks through the call's run, or for a single
    call."""

    def approve(asked: ApprovalRequest) -> bool:
        presented_whole(asked.tool, asked.arguments)
        if asked.run:
            return runs.ask(asked)
        approval, above = SINGLE_APPROVAL.get(), CALLING.get()
        if (
            approval is None or above is not None
        ):  # above: a tool made this call, and that tool would run again
            raise ApprovalRequired(
                f"{asked.tool} needs approval by a person, who cannot be asked from here: call it "
                "with call_tool, or from run_code without a session, not from a tool, with a client "
                "that supports elicitation",
                tool=asked.tool,
            )
        return approval.judge(asked)

    return approve


def can_ask(context: Context) -> bool:
    """Tell whether the client declared that it can show a form."""
    capabilities = context.session.client_capabilities
    forms = capabilities.elicitation if capabilities else None
    return forms is not None and (forms.form is not None or forms.url is None)


async def ask(context: Context, questions: list[ApprovalQuestion]) -> Verdicts:
    """Ask a client during its request, one question after the other; only an explicit yes approves."""
    verdicts = {}
    for question in questions:
        answer: types.ElicitResult | None = None
        with anyio.move_on_after(WAIT_SECONDS):
            try:
                answer = await context.session.elicit_form(
                    question.message, _FORM, context.request_id
                )
            except MCPError:
                answer = None  # it cannot, despite its declaration
        verdicts[question.key] = is_yes(answer)
    return verdicts


def requests_of(questions: list[ApprovalQuestion]) -> types.InputRequests:
    """Return the questions for a client that answers with its next request."""
    return {
        question.key: types.ElicitRequest(
            params=types.ElicitRequestFormParams(message=question.message, requested_schema=_FORM)
        )
        for question in questions
    }


def verdicts_of(questions: list[ApprovalQuestion], responses: Mapping[str, Any] | None) -> Verdicts:
    """Return a client's decisions; a missing answer is a no."""
    given = responses or {}
    return {question.key: is_yes(given.get(question.key)) for question in questions}


def is_yes(answer: object) -> bool:
    """Tell whether an answer to the form approves the call."""
    return (
        isinstance(answer, types.ElicitResult)
        and answer.action == "accept"
        and (answer.content or {}).get(_YES) is True
    )


class StoredCall(NamedTuple):
    """A call that continues by `go_on` once its questions are answered, until the time `until`."""

    owner: str
    until: float
    questions: list[ApprovalQuestion]
    go_on: Callable[..., Any]
    give_up: Callable[[], None]


class PausedCalls:
    """Calls whose answers come with another request.  Only its owner can take a call, and only once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: dict[str, StoredCall] = {}
        self._quota = ClientQuota("calls that wait for approval", _PER_OWNER, _TOTAL, "answer some")

    def hold(
        self, owner: Owner, questions: list[ApprovalQuestion], go_on: Callable[..., Any],
        give_up: Callable[[], None],
    ) -> str:  # fmt: skip
        """Store a call and return the name to take it by; raises BusyError, having given the call up,
        if too many are stored."""
        self.expire()
        try:
            self._quota.take(owner.id)
        except BusyError:
            give_up()
            raise
        name = secrets.token_hex(16)
        stored = StoredCall(owner.id, self._clock() + WAIT_SECONDS, questions, go_on, give_up)
        with self._lock:
            self._stored[name] = stored
        return name

    def take(self, owner: Owner, name: str) -> StoredCall | None:
        """Remove and return the call of that name if it is this owner's, else None."""
        self.expire()
        with self._lock:
            stored = self._stored.get(name)
            if stored is None or stored.owner != owner.id:
                return None
            del self._stored[name]
        self._quota.give_back(owner.id)
        return stored

    def expire(self) -> None:
        """Give up the calls that were not answered in time."""
        with self._lock:
            late = [name for name, each in self._stored.items() if each.until <= self._clock()]
            expired = [self._stored.pop(name) for name in late]
        for stored in expired:
            self._quota.give_back(stored.owner)
            stored.give_up()

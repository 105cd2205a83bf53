"""PausedCall the person at the other end before a risky call is made.

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
from .clients import Context, Owner

WAIT_SECONDS = 600.0
_MOST_WAITING, _MOST_OF_ONE = 256, 16
DECLINED = "the person did not say yes"
_YES = "approve"
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {_YES: {"type": "boolean", "title": "Make this call", "default": False}},
    "required": [_YES],
}


class ApprovalQuestion(NamedTuple):
    """A call that waits; `key` is what its answer comes under."""

    key: str
    tool: str
    arguments: Mapping[str, Any]
    reason: str

    @property
    def message(self) -> str:
        """What the person reads: written by us, with what others wrote escaped and set apart.

        Raises ApprovalRequired for arguments that cannot be shown whole; `approver` refuses those
        before there is a question.
        """
        return (
            f"CallContext the tool {harmless(self.tool)!r}, once?\n"
            f"{presented_whole(self.tool, self.arguments)}\n"
            f"ApprovalRequest because: {harmless(self.reason)}"
        )


Verdicts = dict[str, bool]


class SingleApproval:
    """What a person has said of one single call, or has yet to be asked."""

    def __init__(self) -> None:
        self.asked: ApprovalRequest | None = None
        self._approved: bool | None = None

    def answer(self, *, approved: bool) -> None:
        """Note what was said of the call that was asked about."""
        self._approved = approved

    def judge(self, asked: ApprovalRequest) -> bool:
        """Tell whether this very call was approved, which it is once.

        Raises RunPaused if nobody was asked about it, ApprovalRequired if there was no yes.
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
    """Return the `approve` of a broker: by the run that a call belongs to, or the single call it is."""

    def approve(asked: ApprovalRequest) -> bool:
        presented_whole(asked.tool, asked.arguments)
        if asked.run:
            return runs.ask(asked)
        approval, above = SINGLE_APPROVAL.get(), CALLING.get()
        if (
            approval is None or above is not None
        ):  # above: a tool calls, which would be called again
            raise ApprovalRequired(
                f"{asked.tool} has to be approved by a person, who cannot be asked from here: call it "
                "by call_tool, or from run_code without a session, not from a tool, of a client that "
                "knows elicitation",
                tool=asked.tool,
            )
        return approval.judge(asked)

    return approve


def can_ask(context: Context) -> bool:
    """Tell whether the client said that it can show its person a form."""
    capabilities = context.session.client_capabilities
    forms = capabilities.elicitation if capabilities else None
    return forms is not None and (forms.form is not None or forms.url is None)


async def ask(context: Context, questions: list[ApprovalQuestion]) -> Verdicts:
    """Ask a client that can be asked back, one question after the other; only a yes is one."""
    verdicts = {}
    for question in questions:
        answer: types.ElicitResult | None = None
        with anyio.move_on_after(WAIT_SECONDS):
            try:
                answer = await context.session.elicit_form(
                    question.message, _FORM, context.request_id
                )
            except MCPError:
                answer = None  # it cannot, whatever it said
        verdicts[question.key] = is_yes(answer)
    return verdicts


def requests_of(questions: list[ApprovalQuestion]) -> types.InputRequests:
    """Return the questions for a client that is to answer with its next request."""
    return {
        question.key: types.ElicitRequest(
            params=types.ElicitRequestFormParams(message=question.message, requested_schema=_FORM)
        )
        for question in questions
    }


def verdicts_of(questions: list[ApprovalQuestion], responses: Mapping[str, Any] | None) -> Verdicts:
    """Return what a client answered; no answer is a no."""
    given = responses or {}
    return {question.key: is_yes(given.get(question.key)) for question in questions}


def is_yes(answer: object) -> bool:
    """Tell whether an answer to the form approves."""
    return (
        isinstance(answer, types.ElicitResult)
        and answer.action == "accept"
        and (answer.content or {}).get(_YES) is True
    )


class StoredCall(NamedTuple):
    """What goes on once its questions are answered."""

    owner: str
    until: float
    questions: list[ApprovalQuestion]
    go_on: Callable[..., Any]
    give_up: Callable[[], None]


class PausedCalls:
    """What waits for answers that come with another request: each is its owner's, and taken once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, StoredCall] = {}

    def hold(
        self, owner: Owner, questions: list[ApprovalQuestion], go_on: Callable[..., Any],
        give_up: Callable[[], None],
    ) -> str:  # fmt: skip
        """Keep it, and return the name to take it by; raises BusyError if too much waits."""
        name = secrets.token_hex(16)
        held = StoredCall(owner.id, self._clock() + WAIT_SECONDS, questions, go_on, give_up)
        self.expire()
        with self._lock:
            own = sum(each.owner == owner.id for each in self._held.values())
            if own < _MOST_OF_ONE and len(self._held) < _MOST_WAITING:
                self._held[name] = held
                return name
        give_up()
        raise BusyError("too many calls wait for approval already", "answer or drop some")

    def take(self, owner: Owner, name: str) -> StoredCall | None:
        """Return what waits under this name for this owner, once."""
        self.expire()
        with self._lock:
            held = self._held.get(name)
            return self._held.pop(name) if held and held.owner == owner.id else None

    def expire(self) -> None:
        """Give up what nobody has answered in time."""
        with self._lock:
            late = [name for name, held in self._held.items() if held.until <= self._clock()]
            gone = [self._held.pop(name) for name in late]
        for held in gone:
            held.give_up()

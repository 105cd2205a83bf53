"""Approvals over MCP: the person at the other end is asked before a risky call is made.

The client and owner of a request are taken from the channel, never from the content of the request.
No cell lives while the person decides.  A program that makes a risky call is stopped, and runs again
with the answers that it already had once the person has decided (`Runs`); a single call has not begun
by then.  An approval is good for one version of a tool with exactly the shown arguments, once.
"""

import contextvars
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio
from mcp import MCPError, types
from mcp.server import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ....policies.errors import ApprovalRequired, BusyError
from ...runs.durable_runs import RunPaused, Runs
from ...text.terminal_text import harmless, presented_whole
from ...tools.approval import ApprovalRequest, Approve, asking
from ...tools.tool import CALLING
from ..client_quota import CLIENT, ClientQuota, OwnedTable

_SESSION = "mcp-session-id"
# Limits of one answer.  The SDK's client reads at most 1 MiB of an event over HTTP by default; over
# pipes clients have no limit, and a picture of 8 MiB takes 11 MiB as base64.
HTTP_BYTES, PIPE_BYTES = 1_000_000, 12 * 1024 * 1024

Context = ServerRequestContext[Any, Any]


class Owner(NamedTuple):
    """The owner of sessions and paused calls.

    `client` is the name of a token, or the one client at the other end of a pipe.  `id` is narrower:
    the conversation that began with a handshake.  The stateless protocol over HTTP has no
    conversations; all holders of a token are one owner then.  So they may not list sessions
    (`may_list`), and a session's id is known only to the client that opened it.  An answer has at most
    `answer_bytes`.
    """

    client: str
    id: str
    may_list: bool = True
    answer_bytes: int = HTTP_BYTES


PIPE = Owner("pipe", "pipe", answer_bytes=PIPE_BYTES)


def owner_of(context: Context) -> Owner:
    """Return the owner of a request."""
    request = context.request
    if request is None:
        return PIPE
    client = str(request.scope[CLIENT])  # KeyError if the middleware did not admit the request
    if is_modern(context):
        return Owner(client, client, may_list=False)
    return Owner(client, owner_id(client, request.headers[_SESSION]))


def owner_id(client: str, session: str) -> str:
    """Return the id of a conversation's owner; it is hashed, because the conversation's id is a secret
    and this id goes to the trail."""
    return f"{client}/{hashlib.sha256(session.encode()).hexdigest()[:16]}"


def is_modern(context: Context) -> bool:
    """Tell whether the client uses the protocol without handshakes, in which the server cannot ask
    during a request."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


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


def approver(runs: Runs) -> Approve:
    """Return the `approve` callback of a broker: it asks through the call's run, or for a single
    call."""
    return asking(runs.ask, _judge_single)


def _judge_single(asked: ApprovalRequest) -> bool:
    approval, above = SINGLE_APPROVAL.get(), CALLING.get()
    if approval is None or above is not None:  # a tool made this call and would run again
        raise ApprovalRequired(
            f"{asked.tool} needs approval by a person, who cannot be asked from here: call it "
            "with call_tool, or from run_code without a session, not from a tool, with a client "
            "that supports elicitation",
            tool=asked.tool,
        )
    return approval.judge(asked)


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
                answer = None  # the client cannot ask, despite its declaration
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
        quota = ClientQuota("calls that wait for approval", _PER_OWNER, _TOTAL, "answer some")
        self._stored: OwnedTable[str, StoredCall] = OwnedTable(
            quota, lambda each: each.until <= self._clock(), lambda name, each: each.give_up()
        )

    def hold(
        self, owner: Owner, questions: list[ApprovalQuestion], go_on: Callable[..., Any],
        give_up: Callable[[], None],
    ) -> str:  # fmt: skip
        """Store a call and return the name to take it by; raises BusyError, having given the call up,
        if too many are stored."""
        name = secrets.token_hex(16)
        stored = StoredCall(owner.id, self._clock() + WAIT_SECONDS, questions, go_on, give_up)
        try:
            with self._stored.room(owner.id) as put:
                put(name, stored)
        except BusyError:
            give_up()
            raise
        return name

    def take(self, owner: Owner, name: str) -> StoredCall | None:
        """Remove and return the call of that name if it is this owner's and not too late, else None."""
        self._stored.drop_over()
        stored = self._stored.get(name)
        return self._stored.pop(name) if stored and stored.owner == owner.id else None

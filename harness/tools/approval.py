"""Approval: a person allows a call of a risky tool before the broker makes it."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import ApprovalRequired
from ..text.terminal_text import harmless, presented_whole


class ApprovalRequest(NamedTuple):
    """A call that needs approval: its tool, arguments and caller, and the rule that requires it.

    `arguments` are those of the tool, for the person; `written` are the caller's own, which have tokens
    in place of personal data, if they differ.
    """

    tool: str
    description: str
    arguments: dict[str, Any]
    caller: str
    reason: str
    run: str = ""  # the durable run that can wait for the decision; "" if the call cannot wait
    version: str = ""  # version of the tool: `ToolSpec.identity`
    call: str = ""  # the identity of the call within the run
    written: dict[str, Any] | None = None

    @property
    def kept_arguments(self) -> dict[str, Any]:
        """The arguments that may be written to a file: without personal data."""
        return self.arguments if self.written is None else self.written

    @property
    def digest(self) -> str:
        """Return the hash of the tool's version and the arguments; an approval holds for it alone."""
        return digest(f"{self.tool}@{self.version}", self.kept_arguments)


Approve = Callable[[ApprovalRequest], bool]  # True approves this one call


def digest(tool: str, arguments: dict[str, Any]) -> str:
    """Return the hash of a call; the order of the arguments does not matter."""
    return hashlib.sha256(msgspec.json.encode([tool, arguments], order="deterministic")).hexdigest()


def ask_terminal(asked: ApprovalRequest) -> bool:
    """Ask the person at the terminal; only the answer `yes` approves.

    Raises ApprovalRequired if the arguments are too long to be shown whole.
    """
    arguments = presented_whole(asked.tool, asked.arguments)
    caller, tool = harmless(asked.caller), harmless(asked.tool)
    print(f"{caller} wants to call {tool}: {harmless(asked.reason)}", file=sys.stderr)
    print(arguments, file=sys.stderr)
    print(
        "  Type yes to approve this one call with exactly these arguments: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip() == "yes"


def refusing(why: str, hint: str) -> Approve:
    """Return an approver that refuses every call, and tells what to do instead."""

    def refuse(asked: ApprovalRequest) -> bool:
        raise ApprovalRequired(f"{asked.tool} must be approved, {why}", hint, tool=asked.tool)

    return refuse


refuse_approval = refusing("and no approver is set", "pass approve=, a function that asks a person")


def asking(by_run: Approve, otherwise: Approve) -> Approve:
    """Return the approver of a server: it asks by the run of a call, or else by `otherwise`, and
    refuses a call whose arguments cannot be shown whole."""

    def approve(asked: ApprovalRequest) -> bool:
        presented_whole(asked.tool, asked.arguments)
        return (by_run if asked.run else otherwise)(asked)

    return approve

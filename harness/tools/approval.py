"""Asking a person before a risky tool is called."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import ApprovalRequired
from ..text.presentation import presented_whole
from ..text.terminal import harmless


class ApprovalRequest(NamedTuple):
    """A call that waits for a word: what would be done, for whom, and which rule wants it approved."""

    tool: str
    description: str
    arguments: dict[str, Any]
    caller: str
    reason: str
    run: str = ""  # that can wait for the word
    version: str = ""  # of the tool: `ToolSpec.identity`
    call: str = ""  # its identity within the run

    @property
    def digest(self) -> str:
        """What an approval is bound to: this version of the tool, and its arguments."""
        return digest(f"{self.tool}@{self.version}", self.arguments)


Approve = Callable[[ApprovalRequest], bool]  # True lets this one call go on


def digest(tool: str, arguments: dict[str, Any]) -> str:
    """Return the hash of a call, the same however its arguments are ordered."""
    return hashlib.sha256(msgspec.json.encode([tool, arguments], order="deterministic")).hexdigest()


def ask_terminal(asked: ApprovalRequest) -> bool:
    """Ask the person at the terminal; only `yes` approves.  For programs that have a terminal.

    Raises ApprovalRequired if the arguments cannot be shown whole.
    """
    arguments = presented_whole(asked.tool, asked.arguments)
    caller, tool = harmless(asked.caller), harmless(asked.tool)
    print(f"{caller} wants to call {tool}: {harmless(asked.reason)}", file=sys.stderr)
    print(arguments, file=sys.stderr)
    print("  yes, once, with just these arguments? ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == "yes"


def refuse_approval(asked: ApprovalRequest) -> bool:
    """Refuse: no approver is set."""
    raise ApprovalRequired(
        f"{asked.tool} must be approved, and no approver is set",
        "pass approve=, a function that asks a person",
        tool=asked.tool,
    )

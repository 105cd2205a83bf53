"""`StepSession`: the session in which the programs of one run execute, rebuilt after a restart.

Each step is a durable run (harness/runs): its calls of tools are recorded, so that they are not made
twice, and it can wait for a person.  A new process makes the session again by repeating the finished
steps, which get the recorded answers; nothing is called.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...policies.closing import Closing
from ...policies.errors import SessionLost
from ...runner.result import SandboxResult, SandboxStatus
from ..runs.durable_runs import Runs
from ..sandbox.parameters import CallArguments
from ..sandbox.sandbox import Sandbox
from ..sandbox.session import Session
from .prompts import prelude
from .reply import CodeAction, read_reply
from .transcript import AgentStep

CODE, ERROR, LOST, UNUSABLE, ANSWER = "code", "error", "lost", "unusable", "answer"
_RAN = (CODE, ERROR, ANSWER)
_LOST = "The session ended, and with it every variable and file. A new one has begun."


class StepResult(NamedTuple):
    """What came of a program; `outcome` is a word of AgentStep, empty while it waits for a person.

    `notice` says what the model must know beside the result.
    """

    result: SandboxResult | None
    outcome: str
    notice: str = ""


class StepSession(Closing):
    """The session of one run of an agent."""

    def __init__(self, sandbox: Sandbox, runs: Runs, run: str) -> None:
        self._sandbox, self._runs, self._run = sandbox, runs, run
        self._session: Session | None = None
        self._notice = ""

    def rebuild(self, steps: Sequence[AgentStep]) -> None:
        """Repeat the finished steps after the last one that lost the session."""
        since = max((each.number for each in steps if each.outcome == LOST), default=0)
        for each in steps:
            is_code = isinstance(read_reply(each.reply), CodeAction)
            if each.number <= since or each.outcome not in _RAN or not is_code:
                continue
            attempt = self._runs.repeat(self._opened(), call_run(self._run, each.number))
            if attempt.result.reason == "diverged" or self._is_lost():
                self._notice = (
                    f"The run was resumed, and program {each.number} did something else when it was "
                    "repeated: its variables, and later ones, may be missing. Look before you use them."
                )
                if self._is_lost():
                    return

    def execute(self, number: int, code: str, timeout: float) -> StepResult:
        """Execute the program of a step, or finish it if it was begun in another process."""
        given = CallArguments(code=code, plain=False)
        try:
            run = call_run(self._run, number)
            result = self._runs.finish(self._opened(), run, given, timeout=timeout).result
        except SessionLost as lost:
            self.close()
            return StepResult(None, LOST, f"{_LOST} {lost.what}.")
        notice, self._notice = self._notice, ""
        if result.status is SandboxStatus.PENDING:
            return StepResult(result, "", notice)
        if self._is_lost():
            self.close()
            return StepResult(result, LOST, _LOST)
        return StepResult(result, CODE if result.ok else ERROR, notice)

    def close(self) -> None:
        """End the session; the next step opens another.  Closing twice is fine."""
        if self._session:
            self._session.close()
            self._session = None

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._sandbox.session(self._run)
            has_files = self._sandbox.has_tool("file_write")
            prepared = self._session.execute(prelude(has_files=has_files))
            if not prepared.ok:
                raise SessionLost(f"the session cannot be prepared: {prepared.error}")
        return self._session

    def _is_lost(self) -> bool:
        return self._session is not None and bool(self._session.lost)


def call_run(run: str, number: int) -> str:
    """Return the id of the durable run of one step."""
    return f"{run}-{number}"


def run_of(call_run: str) -> str:
    """Return the agent's run to which the durable run of a step belongs."""
    return call_run.rpartition("-")[0]

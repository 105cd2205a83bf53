"""Runs that can wait for a person: kept on disk, and run again once there is a word.

A process cannot be kept, so what it called is: on resuming, the program starts anew in a fresh cell,
and every call that it made before gets the answer that it got then, without being made again.
"""

import time
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...policies.closing import Closing
from ...policies.errors import ApprovalRequired, PolicyError
from ...runner.result import SandboxResult, SandboxStatus
from ..calling import CALLING
from ..executing import Executing
from .approval import Asked
from .recording import PAUSED, Recorder
from .run_store import Approval, RunStore, StoredRun
from .spec import Caller, ToolSpec

DAY_SECONDS = 86_400.0


class Pausing(ApprovalRequired):
    """The call waits for a person; its program is stopped meanwhile."""

    kind = PAUSED


class Attempt(NamedTuple):
    """What came of starting or resuming a run.

    `result.status` is PENDING while it waits.  `unused` are calls of before that a finished program did
    not make again: it went another way.
    """

    run: str
    result: SandboxResult
    unused: tuple[str, ...] = ()


class Runs(Closing):
    """Runs in one file, and the approvals that they wait for.  Several processes may use it.

    Give `ask` to the Broker as its `approve`.  What nobody decides within `wait_seconds` is refused.
    """

    def __init__(self, path: str | None = None, *, wait_seconds: float = DAY_SECONDS) -> None:
        self._store = RunStore(path)
        self._wait_seconds = wait_seconds

    def start(
        self, sandbox: Executing, code: str, language: str = "python", **given: Any
    ) -> Attempt:
        """Run `code` in a fresh cell, so that it can wait; the arguments are those of Sandbox.execute.

        Raises PolicyError for arguments that cannot be kept.
        """
        if unknown := given.keys() & {"on_output", "cancel"}:
            raise PolicyError(f"{', '.join(sorted(unknown))}: cannot be kept with a run")
        run = self._store.begin(code, language, given)
        return self._attempt(sandbox, self._store.get(run))

    def resume(self, sandbox: Executing, run: str, *, abandoned: bool = False) -> Attempt:
        """Run it again, with the answers that it had.

        `abandoned` says that the process in which it last ran is gone.  A call that had begun and has
        no answer is made again if that does no harm (`ToolSpec.may_be_repeated`); else the program is
        told that nobody knows what came of it.  Raises PolicyError if it does not wait.
        """
        self._store.expire()
        self._store.take_up(run, abandoned=abandoned)
        return self._attempt(sandbox, self._store.get(run))

    def pending(self) -> tuple[Approval, ...]:
        """Return what waits for a word, the oldest first."""
        self._store.expire()
        return self._store.pending()

    def approve(self, approval: str) -> bool:
        """Let the one call, with just these arguments, be made; False if it does not wait any more."""
        self._store.expire()
        return self._store.decide(approval, "approved")

    def reject(self, approval: str, why: str = "") -> bool:
        """Refuse the call: the program gets an exception.  False if it does not wait any more."""
        return self._store.decide(approval, "rejected", why)

    def grant(self, tool: ToolSpec, *, count: int = 1, seconds: float = DAY_SECONDS) -> None:
        """Approve calls of just this version of a tool, with any arguments, beforehand: so many, for so
        long."""
        self._store.grant(tool.name, tool.identity, count, time.time() + seconds)

    def forget(self, run: str | None = None) -> None:
        """Remove all that is known of a run, which then cannot be resumed; or of each that is over."""
        self._store.forget(run)

    def expire(self) -> int:
        """Refuse what has waited too long; return how much that was."""
        return self._store.expire()

    def ask(self, asked: Asked) -> bool:
        """Tell whether a call was approved; else have its run wait.  For `Broker(approve=...)`."""
        if not asked.run:
            raise ApprovalRequired(
                f"{asked.tool} has to be approved, and this call cannot wait",
                "start the program with Runs.start",
                tool=asked.tool,
            )
        state, why = self._store.use(asked, time.time() + self._wait_seconds)
        if state == "pending":
            raise Pausing(f"{asked.tool} waits for approval", tool=asked.tool)
        if state != "approved":
            words = f"{asked.tool} was {state}" + (f": {why}" if why else "")
            raise ApprovalRequired(words, tool=asked.tool)
        return True

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._store.close()

    def _attempt(self, sandbox: Executing, stored: StoredRun) -> Attempt:
        recorder = Recorder(self._store, stored.run)
        above = CALLING.get() or Caller()  # a tool may start one: its depth and its budget hold
        token = CALLING.set(above._replace(id=stored.run, recorder=recorder))
        try:
            result = sandbox.execute(
                stored.code, stored.language, cancel=recorder.stop, **stored.given
            )
        except BaseException:
            self._store.end(stored.run, "failed")
            raise
        finally:
            CALLING.reset(token)
            recorder.close()
        if recorder.is_paused:
            self._store.end(stored.run, PAUSED)
            waiting = [each.tool for each in self._store.pending() if each.run == stored.run]
            return Attempt(stored.run, _pending(result, waiting))
        self._store.end(stored.run, "completed" if result.ok else "failed")
        return Attempt(stored.run, result, recorder.replay.left())


def _pending(result: SandboxResult, tools: list[str]) -> SandboxResult:
    return replace(
        result,
        status=SandboxStatus.PENDING,
        reason="approval",
        error=f"waits for approval of {', '.join(tools)}",
    )

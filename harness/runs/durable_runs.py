"""`Runs`: programs that can wait for a person and outlive their process, because their calls are
recorded on disk.

On resuming, the program starts again in a new cell, and every call that it made before gets the
recorded answer without being made again.
"""

import enum
import os
import time
from functools import partial
from typing import Any, NamedTuple, Unpack

import msgspec
from msgspec.structs import replace

from ...policies.closing import Closing
from ...policies.errors import ApprovalRequired, PolicyError
from ...policies.languages import PYTHON
from ...runner.messages import Answer
from ...runner.requests.result import SandboxResult, SandboxStatus
from ..sandbox.calls.executing import Executing
from ..sandbox.parameters import CallArguments, CallOptions
from ..schemas.spec import ToolSpec
from ..tools.approval import ApprovalRequest, refusing
from ..tools.tool import CALLING, Caller
from .recorder import PAUSED, CallsInProgress, RunRecorder
from .replay import RecordedCall
from .run_store import Approval, RunStore, RunSummary, StoredRun

DAY_SECONDS = 86_400.0
_ENDING = 1000  # kept characters of the text about an attempt's end
# Reasons with which a run pauses. A program that waits for approval was stopped by its recorder, or by
# its deadline while another call took too long. A program that ended by itself did not need the answer.
_STOPPED = (SandboxStatus.CANCELLED, SandboxStatus.TIMEOUT)


class RunPaused(ApprovalRequired):
    """The call waits for a person; its program is stopped until the run is resumed."""

    kind = PAUSED


class RunAttempt(NamedTuple):
    """The outcome of starting or resuming a run.

    `result.status` is PENDING while it waits for approval.  `result.reason` is `diverged` if the
    program was stopped before a call that differs from the record.  `unused` are the recorded calls
    that the program did not make again before it ended.
    """

    run: str
    result: SandboxResult
    unused: tuple[str, ...] = ()


class CallState(enum.Enum):
    """How far a recorded call got."""

    WAITING = "waiting"  # waits for approval, or was interrupted before it was made
    UNKNOWN = "unknown"  # the call began, and its outcome is not recorded
    DONE = "done"
    FAILED = "failed"  # the tool failed, and may have done a part of its work
    REFUSED = "refused"  # the call was not made


class RunCall(NamedTuple):
    """A recorded call of a run; `answer` is JSON, or the text of the error.

    `tool_digest` is the ToolSpec.digest of the tool that was called; empty if none was.
    """

    number: int
    site: str
    tool: str
    arguments: dict[str, Any]
    state: CallState
    answer: str
    tool_digest: str = ""


class RunRecord(NamedTuple):
    """The full record of a run; `actions` are the methods of Runs that can be called for it now."""

    run: RunSummary
    calls: tuple[RunCall, ...]
    approvals: tuple[Approval, ...]
    actions: tuple[str, ...]


_cannot_wait = refusing("and this call cannot wait", "start the program with Runs.start")


class Runs(Closing):
    """Runs in one file, with the approvals that they wait for.  Several processes may use the file.

    Pass `ask` to the Broker as its `approve`.  A call without a decision within `wait_seconds` is
    refused.  With `must_exist` a missing file raises RegistryError; by default it is made.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, wait_seconds: float = DAY_SECONDS,
        must_exist: bool = False,
    ) -> None:  # fmt: skip
        self._store = RunStore(path, must_exist=must_exist)
        self._wait_seconds = wait_seconds
        self._working = CallsInProgress()

    def start(
        self, sandbox: Executing, code: str | bytes, language: str = PYTHON,
        **options: Unpack[CallOptions],
    ) -> RunAttempt:  # fmt: skip
        """Execute `code` in a new cell as a durable run; the arguments are those of Sandbox.execute.

        Raises PolicyError for arguments that cannot be stored with the run.
        """
        given = CallArguments.of("start", code=code, language=language, **options)
        return self._begin(sandbox, given)

    def _begin(self, sandbox: Executing, given: CallArguments) -> RunAttempt:
        return self._attempt(sandbox, self._store.get(self._store.begin(given)))

    def resume(
        self, sandbox: Executing, run: str, *, abandoned: bool = False,
        allow_divergence: bool = False,
    ) -> RunAttempt:  # fmt: skip
        """Execute a run again, with the recorded answers.

        `abandoned` confirms that the process of its last attempt is gone.  A call that had begun and
        has no answer is made again if `ToolSpec.may_be_repeated`; otherwise the program gets a
        `ToolOutcomeUnknown`.  With `allow_divergence` the program may make other calls in the place of
        recorded ones.  Raises PolicyError, and changes nothing, for a run that is completed, that is
        running, or that does not exist, and if `sandbox` lacks a tool that the run called.
        """
        self._store.expire()
        if not allow_divergence:
            self._require_tools(sandbox, run)
        self._store.take_up(run, abandoned=abandoned)
        return self._attempt(sandbox, self._store.get(run), allow_divergence=allow_divergence)

    def finish(
        self, sandbox: Executing, run: str, given: CallArguments, *, timeout: float | None = None
    ) -> RunAttempt:
        """Start the run of that id, or resume it, as abandoned, if it was started already; if it is
        completed, repeat it.

        So a caller that chooses the id reaches the end of a run once, however often it is killed.
        `timeout` is that of this attempt and is not recorded; a repetition has the one of `given`.
        """
        state = self._store.state(run)
        if state == "completed":
            return self.repeat(sandbox, run)
        if not state:
            self._store.begin(given, run)
        else:
            self._require_tools(sandbox, run)
            self._store.take_up(run, abandoned=True)
        stored = self._store.get(run)
        if timeout is not None:
            stored = stored._replace(given=replace(stored.given, timeout=timeout))
        return self._attempt(sandbox, stored)

    def repeat(self, sandbox: Executing, run: str) -> RunAttempt:
        """Execute a run that is over again, with the recorded answers: it has the same state in a
        session then, and no call is made.

        A program that makes another call than before is stopped: the reason is `diverged`.
        """
        return self._attempt(sandbox, self._store.get(run), is_repeat=True)

    def _require_tools(self, sandbox: Executing, run: str) -> None:
        """Raise PolicyError unless `sandbox` has the tools that a run called: without them the program
        would fail, and its pending approvals would be withdrawn."""
        called = dict.fromkeys(each.tool for each in self._store.calls(run) if each.needs_tool)
        if missing := [name for name in called if not sandbox.has_tool(name)]:
            raise PolicyError(
                f"run {run} cannot be resumed: it called {', '.join(missing)}, which the sandbox does "
                "not offer",
                "offer these tools (tools=; --tools FILE or --registry FILE), or allow other calls "
                "than the recorded ones (allow_divergence=True; --allow-divergence)",
            )

    def kept(self) -> tuple[RunSummary, ...]:
        """Return all runs, the oldest first."""
        return self._store.kept()

    def size_of(self, beginning: str) -> tuple[int, int]:
        """Return how many runs have an id that begins so, and the bytes that are recorded of them."""
        return self._store.size_of(beginning)

    def show(self, run: str) -> RunRecord:
        """Return the full record of a run: its calls, its pending approvals, and the possible actions.

        Raises PolicyError for an unknown run.
        """
        self._store.expire()
        (kept,) = self._store.kept(run)
        calls = self.calls(run)
        approvals = tuple(each for each in self._store.pending() if each.run == run)
        unknown = any(each.state is CallState.UNKNOWN for each in calls)
        return RunRecord(kept, calls, approvals, _actions(kept, approvals, unknown=unknown))

    def calls(self, run: str) -> tuple[RunCall, ...]:
        """Return the recorded calls of a run; none if there is no such run."""
        return tuple(_shown(each) for each in self._store.calls(run))

    def mark(self, run: str, number: int, *, made: bool, value: Any = None) -> None:
        """Record the outcome of a call whose outcome is unknown.

        If it was `made`, the program gets `value` as its answer; otherwise the call is made when the
        program makes it again.  Raises PolicyError for a call with a known outcome, and for a value
        that is not JSON.
        """
        try:
            data = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise PolicyError(f"value: {error}") from None
        self._store.mark(run, number, Answer(0, data) if made else None)

    def pending(self) -> tuple[Approval, ...]:
        """Return the pending approvals, the oldest first."""
        self._store.expire()
        return self._store.pending()

    def approve(self, approval: str) -> bool:
        """Approve this one call with exactly these arguments; return False if it no longer waits."""
        self._store.expire()
        return self._store.decide(approval, "approved")

    def reject(self, approval: str, why: str = "") -> bool:
        """Refuse the call: the program gets an exception.  Return False if it no longer waits."""
        return self._store.decide(approval, "rejected", why)

    def grant(self, tool: ToolSpec, *, count: int = 1, seconds: float = DAY_SECONDS) -> None:
        """Approve the next `count` calls of exactly this version of a tool, with any arguments, for
        `seconds`."""
        self._store.grant(tool.name, tool.identity, count, time.time() + seconds)

    def forget(self, run: str | None = None) -> None:
        """Remove the record of a run, which then cannot be resumed; without `run`, the records of all
        completed and failed runs."""
        self._store.forget(run)

    def expire(self) -> int:
        """Refuse the calls that have waited too long; return their number."""
        return self._store.expire()

    def ask(self, asked: ApprovalRequest) -> bool:
        """Return True if a call was approved; for `Broker(approve=...)`.

        Raises RunPaused, which makes its run wait, or ApprovalRequired if it was refused.
        """
        if not asked.run:
            return _cannot_wait(asked)
        state, why = self._store.use(asked, time.time() + self._wait_seconds)
        if state in ("pending", "over"):
            raise RunPaused(
                f"{asked.tool} waits for approval" + (f": {why}" if why else ""), tool=asked.tool
            )
        if state != "approved":
            words = f"{asked.tool} was {state}" + (f": {why}" if why else "")
            raise ApprovalRequired(words, tool=asked.tool)
        return True

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._store.close()

    def _attempt(
        self, sandbox: Executing, stored: StoredRun, *, allow_divergence: bool = False,
        is_repeat: bool = False,
    ) -> RunAttempt:  # fmt: skip
        recorder = RunRecorder(
            self._store, stored, self._working, allow_divergence=allow_divergence,
            is_repeat=is_repeat,
        )  # fmt: skip
        above = CALLING.get() or Caller()  # a tool may start a run: its depth and its budget apply
        token = CALLING.set(replace(above, id=stored.run, recorder=recorder))
        end = partial(self._end, stored, is_repeat)
        try:
            result = sandbox._execute(replace(stored.given, cancel=recorder.stop))
        except BaseException as error:
            end("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            CALLING.reset(token)
            recorder.close()
        if recorder.diverged and result.status is SandboxStatus.CANCELLED:
            result = _diverged(result, recorder.diverged)
            end("diverged", recorder.diverged)
        elif recorder.suspended and result.status in _STOPPED:
            end(PAUSED)
            waiting = [each.tool for each in self._store.pending() if each.run == stored.run]
            return RunAttempt(stored.run, _pending(result, waiting))
        else:
            ending = f"{result.status.value}, {result.reason}: {result.error or ''}".rstrip(": ")
            end("completed" if result.ok else "failed", "" if result.ok else ending)
        return RunAttempt(stored.run, result, recorder.left())

    def _end(self, stored: StoredRun, is_repeat: bool, state: str, ending: str = "") -> None:
        if not is_repeat:
            self._store.end(stored.run, state, ending[:_ENDING], attempt=stored.attempt)


def _pending(result: SandboxResult, tools: list[str]) -> SandboxResult:
    return replace(
        result,
        status=SandboxStatus.PENDING,
        reason="approval",
        error=f"waits for approval of {', '.join(tools)}",
    )


def _diverged(result: SandboxResult, how: str) -> SandboxResult:
    return replace(
        result,
        status=SandboxStatus.FAILED,
        reason="diverged",
        error=f"{how}; the program was stopped before this call, so no call was made twice",
    )


def _shown(recorded: RecordedCall) -> RunCall:
    answer, text = recorded.answer, ""
    if answer is None:
        state = CallState.UNKNOWN if recorded.begun else CallState.WAITING
    elif answer.kind:
        state = CallState.FAILED if recorded.begun else CallState.REFUSED
        text = f"{answer.kind}: {answer.message}"
    else:
        state, text = CallState.DONE, (answer.value or b"null").decode(errors="replace")
    arguments = msgspec.json.decode(recorded.arguments)
    return RunCall(
        recorded.number, recorded.site, recorded.tool, arguments, state, text, recorded.tool_digest
    )


def _actions(run: RunSummary, approvals: tuple[Approval, ...], *, unknown: bool) -> tuple[str, ...]:
    decide = ("approve", "reject") if approvals else ()
    mark = ("mark",) if unknown else ()
    resume = () if run.state == "completed" else ("resume",)
    return (*decide, *mark, *resume, "forget")

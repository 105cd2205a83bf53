"""`run_code`: runs programs in fresh cells and in sessions, and pauses those that need approval."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from ....policies.errors import PolicyError
from ....runner.concurrency import NEVER
from ....runner.result import SandboxResult, SandboxStatus
from ...runs.durable_runs import RunAttempt, Runs
from ...runs.store import Approval
from ...sandbox.executing import Executing
from ...sandbox.parameters import CallArguments
from ..cancellable import CancellableExecuting
from ..owned_sessions import OwnedSessions
from ..services import ClientServices, refuse_packages
from .answers import ran
from .approvals import DECLINED, ApprovalQuestion, Verdicts
from .arguments import NEW, RunCodeArguments
from .calls import Outcome, PausedCall
from .clients import Owner
from .request_threads import RequestControl


class ProgramRequest(NamedTuple):
    """A call of `run_code`: owner, arguments, place in the trail, and whether the client can be
    asked."""

    owner: Owner
    asked: RunCodeArguments
    traceparent: str
    can_ask: bool

    def given(self, language: str) -> CallArguments:
        """Return the arguments of the call for a program in `language`."""
        asked = self.asked
        return CallArguments(
            code=asked.code, language=language, files=asked.files, collect=asked.collect,
            timeout=None if asked.timeout is msgspec.UNSET else asked.timeout,
            packages=() if asked.session else asked.packages,  # which the session has
            trace_id=self.traceparent,
        )  # fmt: skip


class ProgramRunner:
    """Runs programs for the clients of one server."""

    def __init__(self, runs: Runs, sessions: OwnedSessions) -> None:
        self._runs = runs
        self._sessions = sessions

    def begin(
        self, services: ClientServices, request: ProgramRequest, control: RequestControl
    ) -> Outcome:
        """Run a program; its failure is in the answer.  Raises what `execute` raises."""
        refuse_packages(services.sandbox.policy, request.asked.packages)
        if request.asked.session:
            return self._in_session(services, request, control)
        executing = _cancellable(services.sandbox, control)
        given = request.given(request.asked.language)
        if request.can_ask:
            with self._forgotten_on_error():
                attempt = self._runs._begin(executing, given)
                return self._outcome(services, attempt, request.owner)
        result = executing._execute(given, None, NEVER)
        notes = _notes(services, result)
        return _ran(services, result, "", notes, request.owner)

    def _in_session(
        self, services: ClientServices, request: ProgramRequest, control: RequestControl
    ) -> Outcome:
        asked, owner = request.asked, request.owner
        if asked.session == NEW:
            session = self._sessions.open(owner, services.sandbox, asked.language, asked.packages)
        elif asked.packages:
            raise PolicyError('packages: only with session="new", or without a session')
        else:
            session = self._sessions.get(owner, asked.session)
        given = request.given(session.language)
        result = _cancellable(session, control)._execute(given, None, NEVER)
        return _ran(services, result, session.id, _notes(services, result), owner)

    def _outcome(self, services: ClientServices, attempt: RunAttempt, owner: Owner) -> Outcome:
        run = attempt.run
        if attempt.result.status is not SandboxStatus.PENDING:
            self._runs.forget(run)
            notes = [f"not called again: {each}" for each in attempt.unused]
            notes += _notes(services, attempt.result)
            return _ran(services, attempt.result, "", notes, owner)
        questions = [
            ApprovalQuestion(
                each.approval, each.tool, _as_the_tool_gets(services, each), each.reason
            )
            for each in self._runs.pending() if each.run == run
        ]  # fmt: skip
        go_on = functools.partial(self._go_on, services, run, owner)
        return PausedCall(questions, go_on, functools.partial(self._runs.forget, run))

    def _go_on(
        self,
        services: ClientServices,
        run: str,
        owner: Owner,
        verdicts: Verdicts,
        control: RequestControl,
    ) -> Outcome:
        for approval, approved in verdicts.items():
            if approved:
                self._runs.approve(approval)
            else:
                self._runs.reject(approval, DECLINED)
        with self._forgotten_on_error():
            attempt = self._runs.resume(_cancellable(services.sandbox, control), run)
            return self._outcome(services, attempt, owner)

    @contextmanager
    def _forgotten_on_error(self) -> Iterator[None]:
        """Forget a run if an exception ends the block."""
        try:
            yield
        except BaseException:
            self._runs.forget()
            raise


def _as_the_tool_gets(services: ClientServices, approval: Approval) -> dict[str, Any]:
    """Return the arguments of a call that waits, for the person: with the values that it restores."""
    if services.privacy is None:
        return approval.arguments
    return services.privacy.restored(approval.tool, approval.arguments, None).arguments


def _ran(
    services: ClientServices, result: SandboxResult, session: str, notes: list[str], owner: Owner
) -> Outcome:
    policy = services.sandbox.policy
    return ran(result.for_model(), session, notes, owner.answer_bytes, policy)


def _notes(services: ClientServices, result: SandboxResult) -> list[str]:
    """Return a note if the cell cut the value, which was too large, to the start of its repr."""
    most = services.sandbox.policy.limits.value_bytes
    if not isinstance(result.value, str) or len(result.value.encode("utf-8", "replace")) < most - 3:
        return []
    return [f"value: more than {most} bytes: only the beginning of its repr"]


def _cancellable(executing: Executing, control: RequestControl) -> CancellableExecuting:
    """Return what executes for a request: it reports output, and ends with the request."""
    return CancellableExecuting(executing, control.stop, control.on_output)

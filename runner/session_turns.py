"""`SessionTurns`: performs the requests of a session in its cell, and knows what they came to."""

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from ..policies.languages import LANGUAGES, PYTHON
from .capture import OnOutput
from .cgroups import CgroupUsage
from .execution import Execution, Turn, WorkspaceChanges, look_at_files, perform, phases
from .held_cell import HeldCell
from .outcome import conclude
from .request import Request
from .result import SandboxResult
from .workspace import Listing, list_files

_LEAST_CPU_SECONDS = 0.001


class SessionPast(NamedTuple):
    """What the requests of a session came to."""

    requests: int
    last_exit_code: int
    cpu_seconds: float


class SessionTurns:
    """The caller lets one request after the other begin."""

    def __init__(self, held: HeldCell, layers: tuple[str, ...], language: str) -> None:
        self._held = held
        self._layers = layers
        self._language = language
        self._is_shell = language in LANGUAGES and LANGUAGES[language].is_shell
        self._last_exit_code = 0
        self._listing: Listing = {}
        self._counted = CgroupUsage()  # events until the end of the request before
        self.requests = 0
        self.cpu_before = 0.0  # CPU seconds that the session used of which this is a branch

    def continue_from(self, past: SessionPast) -> None:
        """Go on where another session was, of which this is a branch by now."""
        self.requests, self._last_exit_code, self.cpu_before = past
        self._listing = list_files(self._held.cell.workspace)

    def past(self) -> SessionPast:
        used = self.cpu_before + (self._held.cell.cgroup.cpu_seconds() or 0.0)
        return SessionPast(self.requests, self._last_exit_code, used)

    def waits_at_doors(self, request: Request | None) -> bool:
        """Tell whether a program that opens a door to a tool waits for the next request, in which there
        is one: that of a shell."""
        return bool(self._is_shell and request and request.on_call)

    def perform(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int,
        is_lost: Callable[[], bool],
    ) -> tuple[SandboxResult, bool]:  # fmt: skip
        """Return the result, and whether the session can go on.  `is_lost`: whether it was closed."""
        request = self._within_cpu_time(request)
        leased_at = time.monotonic()
        self.requests += 1
        cgroup = self._held.cell.cgroup
        before = cgroup.usage()
        performed = self._perform(request, on_output, cancel)
        if is_lost() and not performed.seen.stays:  # it was closed while this ran
            cause = performed.seen.cause or "cancelled"
            performed = replace(performed, seen=replace(performed.seen, cause=cause))
        ended_at = time.monotonic()
        stays = performed.seen.stays
        network = self._held.settle_egress(ends=not stays)
        performed = replace(performed, seen=performed.seen.refused(network.refused))
        made = look_at_files(self._held.cell.workspace, request, self._listing, cancel)
        self._listing = made.listing
        after = cgroup.usage(ended_well=stays)
        counted = _difference(after, before, self._counted)
        self._counted = after
        moments = (asked_at, leased_at, performed.seen.sent_at, ended_at, time.monotonic())
        result = self._conclude(request, performed, made, counted, moments)
        if network.connections:
            result = replace(result, connections=network.connections)
        self._last_exit_code = result.exit_code or 0
        return result, stays

    def _within_cpu_time(self, request: Request) -> Request:
        """Leave a branch the CPU time that the session had left of which it is one."""
        if not self.cpu_before:
            return request
        limits = request.limits
        left = max(_LEAST_CPU_SECONDS, limits.cpu_seconds - self.cpu_before)
        return replace(request, limits=replace(limits, cpu_seconds=left))

    def _perform(self, request: Request, on_output: OnOutput | None, cancel: int) -> Execution:
        """Perform the request; in a language other than Python start the interpreter first, once.
        Refusals during that start are not the program's, and are dropped."""
        turn = Turn(self.requests, self._language, self._last_exit_code)
        if self.requests == 1 and self._language != PYTHON:
            started = perform(self._held, request, None, cancel, turn._replace(number=0))
            said = started.seen.finished
            if not (started.seen.stays and said and said.ends_well):
                return started
            request = replace(request, files=())  # they are written
        return perform(self._held, request, on_output, cancel, turn)

    def _conclude(
        self, request: Request, performed: Execution, made: WorkspaceChanges, counted: CgroupUsage,
        moments: tuple[float, ...],
    ) -> SandboxResult:  # fmt: skip
        return conclude(
            performed.seen, counted, performed.captures, request.limits,
            layers=self._layers, phases=phases(moments),
            execution_time=moments[-1] - moments[0], execution_id=request.execution_id,
            trace_id=request.trace_id, session_lost=not performed.seen.stays,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
        )  # fmt: skip


def _difference(now: CgroupUsage, before: CgroupUsage, events: CgroupUsage) -> CgroupUsage:
    """Return the usage since `before`, and the kills and refused forks since `events`, so that those
    between two requests count for the later one; peaks are of the whole session."""

    user = (now.cpu_user_seconds or 0.0) - (before.cpu_user_seconds or 0.0)
    system = (now.cpu_system_seconds or 0.0) - (before.cpu_system_seconds or 0.0)
    return now._replace(
        cpu_user_seconds=max(0.0, user),
        cpu_system_seconds=max(0.0, system),
        killed_for_memory=max(0, now.killed_for_memory - events.killed_for_memory),
        forks_refused=max(0, now.forks_refused - events.forks_refused),
    )

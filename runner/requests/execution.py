"""One request, executed in a ready cell; the turns of a session; the files that a program left."""

import operator
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from ...policies.languages import LANGUAGES, PYTHON
from ..cells.held_cell import HeldCell
from ..cells.workspace import (
    Artifact,
    Listing,
    Uncollected,
    WorkspaceFile,
    changed,
    collect,
    collecting_budget,
    list_files,
)
from ..cgroups import CgroupUsage
from ..messages import RunProgram, encode
from ..watching.gpu_use import NO_USE, GpuUse
from ..watching.guest_channel import Capture
from ..watching.supervision import Observation, Supervision, Work
from .outcome import conclude
from .request import Request, RequestForm, Streams
from .result import Phases, SandboxResult, SandboxStatus

if TYPE_CHECKING:
    from ..cells.cell_network import OpenedTerminal

_ENTRY_SIZE = 20  # bytes that each entry adds to the size of a directory of tmpfs

_MOST_REASONS = 100  # listed reasons for missing files


class Turn(NamedTuple):
    """The place of a request in a session: its number, from 1, and the exit code of the one
    before.  Number 0 starts the interpreter."""

    number: int
    language: str
    last_exit_code: int


def supervision_of(held: HeldCell, request: Request, turn: Turn | None = None) -> Supervision:
    """Return what runs the program of `request` in the cell; `turn`: it is one of a session."""
    opened = _terminal(held, request)
    captures = _captures(held, request, opened.master if opened else -1)
    nonce = os.urandom(8).hex() if turn and turn.number else ""
    form = _form(request, turn, nonce, opened.path if opened else "")
    work = Work(
        form.program, form.stdin, request.limits, captures, request.cancel,
        stays=turn is not None, on_call=request.on_call, orphans=request.orphans,
        ending=form.ending, nonce=nonce,
    )  # fmt: skip
    return Supervision(held, work)


def _terminal(held: HeldCell, request: Request) -> "OpenedTerminal | None":
    """Open the terminal that the program is to have, if it is to have one."""
    if not (request.program and request.program.terminal):
        return None
    from ..cells.cell_network import open_terminal, resize  # seldom needed

    opened = open_terminal(held.cell.workspace)
    resize(opened.master, *request.program.terminal)
    return opened


def _captures(held: HeldCell, request: Request, master: int) -> tuple[Capture, ...]:
    cell, limit = held.cell, request.limits.output_bytes
    on_output = request.on_output
    stderr = Capture("stderr", cell.stderr, limit, on_output)
    on_streams = request.program.on_streams if request.program else request.on_streams
    if on_streams is None:
        return Capture("stdout", cell.stdout, limit, on_output), stderr
    streams = cell.give_streams_away()
    process = os.dup(cell.guest) if request.program else -1
    on_streams(Streams(*streams, stderr.text, held.network(), process, master))
    return (stderr,)


def _form(request: Request, turn: Turn | None, nonce: str, terminal: str) -> RequestForm:
    if request.program:
        frame = request.program.frame
        if terminal:
            frame = msgspec.structs.replace(frame, terminal=terminal)
        return RequestForm(encode(frame))
    stdin = request.stdin or b""
    if request.become:
        return RequestForm(encode(request.become), stdin)
    run = RunProgram(
        request.code, request.inputs, request.files, request.environment,
        request.limits.value_bytes, turn.number if turn else 0, stdin if turn else b"",
        request.limits.artifact_bytes, request.tools, nonce, request.plain,
        request.arguments, request.sites, request.filename,
    )  # fmt: skip
    if turn is None:
        return RequestForm(encode(run), stdin)
    from .forms import request_form, start_form  # only sessions need it

    if turn.number == 0:
        return start_form(request.files, turn.language)
    return request_form(run, turn.language, turn.last_exit_code)


def called_off(request: Request, asked_at: float, layers: tuple[str, ...]) -> SandboxResult:
    """Return the result of a request that was cancelled before anything of it ran."""
    waited = time.monotonic() - asked_at
    return SandboxResult(
        status=SandboxStatus.CANCELLED, reason="cancelled", error="cancelled while it waited",
        execution_time=waited, phases=Phases(lease=waited), layers=layers,
        execution_id=request.execution_id, trace_id=request.trace_id,
    )  # fmt: skip


class WorkspaceChanges(msgspec.Struct, frozen=True):
    """The files that a program left in /workspace."""

    listing: Listing
    files: tuple[WorkspaceFile, ...]
    artifacts: tuple[Artifact, ...]
    uncollected: tuple[Uncollected, ...] = ()


def look_at_files(workspace: int, request: Request, before: Listing) -> WorkspaceChanges:
    """Return the changes since `before`, without the input files of `request`, and collect;
    collecting ends once the request is cancelled.  Files of `request.given` are collected if they
    changed."""
    if not before and is_empty(workspace):
        return WorkspaceChanges({}, (), ())
    unlisted: list[str] = []
    others: list[str] = []
    listing = list_files(workspace, unlisted.append, others.append)
    import hashlib  # loads OpenSSL, which a program that leaves no files does not need

    inputs = {(file.path, hashlib.sha256(file.data).hexdigest()) for file in request.files}
    files = changed(workspace, before, listing)
    made = tuple(file for file in files if (file.path, file.sha256) not in inputs)
    if not request.collect:
        return WorkspaceChanges(listing, made, ())
    limit = request.limits.artifact_bytes
    budget = collecting_budget(request.cancel)
    given = {file.path: file.data for file in request.files if file.path in request.given}
    artifacts, left_out = collect(workspace, listing, request.collect, limit, budget, given, others)
    left_out += tuple(Uncollected("", 0, why) for why in dict.fromkeys(unlisted[:_MOST_REASONS]))
    return WorkspaceChanges(listing, made, artifacts, left_out)


def is_empty(workspace: int) -> bool:
    """Return whether the top directory is empty; much cheaper than a listing (tmpfs counts entries
    in the size of a directory, BOGO_DIRENT_SIZE in mm/shmem.c)."""
    return os.fstat(workspace).st_size <= 2 * _ENTRY_SIZE


def phases(moments: tuple[float, ...]) -> Phases:
    """Return the durations between moments of one call, by time.monotonic."""
    return Phases(*map(operator.sub, moments[1:], moments))


_LEAST_CPU_SECONDS = 0.001


class SessionPast(NamedTuple):
    """The outcome of a session's requests."""

    requests: int
    last_exit_code: int
    cpu_seconds: float


class SessionTurns:
    """The caller lets one request after the other begin."""

    def __init__(self, held: HeldCell) -> None:
        self._held = held
        self._language = language = held.plan.language
        self._is_shell = language in LANGUAGES and LANGUAGES[language].is_shell
        self._last_exit_code = 0
        self._listing: Listing = {}
        self._counted = CgroupUsage()  # events until the end of the previous request
        self._gpu = NO_USE  # until the end of the previous request
        self.requests = 0
        self.cpu_before = 0.0  # CPU seconds of the session from which this branched

    def continue_from(self, past: SessionPast) -> None:
        """Take over the history of another session, of which this is now a branch."""
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
        self, request: Request, asked_at: float, is_lost: Callable[[], bool]
    ) -> tuple[SandboxResult, bool]:
        """Return the result, and whether the session can go on.  `is_lost`: whether it was closed."""
        request = self._within_cpu_time(request)
        leased_at = time.monotonic()
        self.requests += 1
        cgroup = self._held.cell.cgroup
        before, gpu_before = cgroup.usage(), self._gpu
        seen = self._perform(request)
        if is_lost() and not seen.stays:  # it was closed while this ran
            seen = replace(seen, cause=seen.cause or "cancelled")
        ended_at = time.monotonic()
        stays = seen.stays
        self._gpu = self._held.gpu_use(ends=not stays)
        network = self._held.settle_egress(ends=not stays)
        seen = seen.refused(network.refused)
        made = look_at_files(self._held.cell.workspace, request, self._listing)
        self._listing = made.listing
        after = cgroup.usage(ended_well=stays)
        counted = _difference(after, before, self._counted)
        self._counted = after
        moments = (asked_at, leased_at, seen.sent_at, ended_at, time.monotonic())
        result = self._conclude(request, seen, made, counted, moments, self._gpu.since(gpu_before))
        if network.connections:
            result = replace(result, connections=network.connections)
        self._last_exit_code = result.exit_code or 0
        return result, stays

    def _within_cpu_time(self, request: Request) -> Request:
        """Give a branch the CPU time that its source session had left."""
        if not self.cpu_before:
            return request
        limits = request.limits
        left = max(_LEAST_CPU_SECONDS, limits.cpu_seconds - self.cpu_before)
        return replace(request, limits=replace(limits, cpu_seconds=left))

    def _perform(self, request: Request) -> Observation:
        """Perform the request; in a language other than Python start the interpreter first, once.
        Refusals during that start are not the program's, and are dropped."""
        turn = Turn(self.requests, self._language, self._last_exit_code)
        if self.requests == 1 and self._language != PYTHON:
            silent, first = replace(request, on_output=None), turn._replace(number=0)
            started = supervision_of(self._held, silent, first).run()
            said = started.finished
            if not (started.stays and said and said.ends_well):
                return started
            request = replace(request, files=())  # the files are already written
        return supervision_of(self._held, request, turn).run()

    def _conclude(
        self, request: Request, seen: Observation, made: WorkspaceChanges, counted: CgroupUsage,
        moments: tuple[float, ...], gpu: GpuUse,
    ) -> SandboxResult:  # fmt: skip
        return conclude(
            seen, counted, seen.captures, request.limits, gpu=gpu,
            layers=self._held.plan.layers, phases=phases(moments),
            execution_time=moments[-1] - moments[0], execution_id=request.execution_id,
            trace_id=request.trace_id, session_lost=not seen.stays,
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

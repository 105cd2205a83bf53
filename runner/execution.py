"""`perform`: one request, executed in a ready cell."""

import operator
import os
import time
from typing import NamedTuple

import msgspec

from .capture import Capture, OnOutput
from .held_cell import HeldCell
from .messages import RunProgram, encode
from .request import Request, RequestForm, Streams
from .result import Phases, SandboxResult, SandboxStatus
from .watching.supervision import Observation, Supervision, Work
from .workspace import (
    Artifact,
    Listing,
    Uncollected,
    WorkspaceFile,
    changed,
    collect,
    collecting_budget,
    is_empty,
    list_files,
)

_MOST_REASONS = 100  # of reasons why files were not listed


class Execution(msgspec.Struct, frozen=True):
    seen: Observation
    captures: tuple[Capture, ...]  # of standard output, unless given away, and of standard error


class Turn(NamedTuple):
    """The place of a request in a session: its number, from 1, and the exit code of the one
    before.  Number 0 starts the interpreter."""

    number: int
    language: str
    last_exit_code: int


def perform(
    held: HeldCell, request: Request, on_output: OnOutput | None, cancel: int,
    turn: Turn | None = None,
) -> Execution:  # fmt: skip
    """Have the cell run the program of `request`, which may be one of a session.

    Raises LauncherLost.
    """
    limits = request.limits
    captures = _captures(held, request, on_output)
    nonce = os.urandom(8).hex() if turn and turn.number else ""
    form = _form(request, turn, nonce)
    work = Work(
        form.program, form.stdin, limits, captures, cancel,
        stays=turn is not None, on_call=request.on_call, orphans=request.orphans,
        ending=form.ending, nonce=nonce,
    )  # fmt: skip
    return Execution(Supervision(held, work).run(), captures)


def _captures(held: HeldCell, request: Request, on_output: OnOutput | None) -> tuple[Capture, ...]:
    """Return the captures of the cell's output; streams that were given away are not captured."""
    cell, limit = held.cell, request.limits.output_bytes
    stderr = Capture("stderr", cell.stderr, limit, on_output)
    if request.program is None:
        return Capture("stdout", cell.stdout, limit, on_output), stderr
    request.program.on_streams(Streams(*cell.give_streams_away(), stderr.text, held.network()))
    return (stderr,)


def _form(request: Request, turn: Turn | None, nonce: str) -> RequestForm:
    if request.program:
        return RequestForm(encode(request.program.frame))
    stdin = request.stdin or b""
    run = RunProgram(
        request.code, request.inputs, request.files, request.environment,
        request.limits.value_bytes, turn.number if turn else 0, stdin if turn else b"",
        request.limits.artifact_bytes, request.tools, nonce, request.plain,
        request.arguments, request.sites, request.filename,
    )  # fmt: skip
    if turn is None:
        return RequestForm(encode(run), stdin)
    from .request_forms import request_form, start_form  # for sessions alone

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


def look_at_files(
    workspace: int, request: Request, before: Listing, cancel: int
) -> WorkspaceChanges:
    """Return the changes since `before`, without the input files of `request`, and collect;
    collecting ends once `cancel` is readable.  Files of `request.given` are collected if they
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
    budget = collecting_budget(cancel)
    given = {file.path: file.data for file in request.files if file.path in request.given}
    artifacts, left_out = collect(workspace, listing, request.collect, limit, budget, given, others)
    left_out += tuple(Uncollected("", 0, why) for why in dict.fromkeys(unlisted[:_MOST_REASONS]))
    return WorkspaceChanges(listing, made, artifacts, left_out)


def phases(moments: tuple[float, ...]) -> Phases:
    """Return the durations between moments of one call, by time.monotonic."""
    return Phases(*map(operator.sub, moments[1:], moments))

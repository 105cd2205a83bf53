"""Programs in fresh cells and in sessions: with an answer at the end, or as a stream of their output;
the route of thin plugins, with the state of the session that a request names; and the files of
sessions.

A session belongs to the client that opened it.
"""

import codecs
import contextlib
import re
import sys
from collections.abc import AsyncIterator

import anyio
from msgspec.structs import replace

from ....policies.errors import CellwrightError, PolicyError, WorkspaceError
from ....policies.languages import PYTHON
from ....policies.policy import Policy
from ....runner.audit.record import span_of
from ....runner.requests.result import SandboxResult
from ...sandbox.calls.background import Run
from ...sandbox.calls.executing import Executing
from ...sandbox.parameters import CallArguments
from ...sandbox.pythons import find_python, pythons
from ...sandbox.sessions.session import Session
from ..http_access import run_in_thread
from ..served_requests import refuse_packages
from . import web_messages as web
from .endpoint import ContentAnswer, Endpoint, ServerEvent, WebCall

STARTED, OUTPUT, RESULT = "started", "output", "result"


def execute(call: WebCall) -> web.ExecutionAnswer:
    """Run a program in a fresh cell."""
    sandbox = call.state.services.of(call.client).sandbox
    given = given_of(call, sandbox.policy)
    return web.execution_answer(sandbox._execute(replace(given, cancel=call.stop)).for_model())


async def stream_execution(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Run a program in a fresh cell, and send its output as it comes."""
    services = await run_in_thread(call.state.services.of, call.client)
    given = given_of(call, services.sandbox.policy)
    async for event in stream_of(services.sandbox, given):
        yield event


async def stream_of(executing: Executing, given: CallArguments) -> AsyncIterator[ServerEvent]:
    """Execute, and yield the output as it comes and the result; ends the program if it is closed."""
    run = Run(executing._execute, given)
    try:
        yield ServerEvent(STARTED, web.StartedEvent())
        async for event in _output(run):
            yield event
        yield ServerEvent(RESULT, web.execution_answer((await run.aresult()).for_model()))
    finally:
        run.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(CellwrightError):
            await run.aresult()  # counts as an execution until its cell is gone


async def _output(run: Run) -> AsyncIterator[ServerEvent]:
    make = codecs.getincrementaldecoder("utf-8")  # a character may be split between two pieces
    decoders = {"stdout": make("replace"), "stderr": make("replace")}
    async for stream, data in run.output():
        if text := decoders[stream].decode(data):
            yield ServerEvent(OUTPUT, web.OutputEvent(stream=stream, text=text))
    for stream, decoder in decoders.items():
        if text := decoder.decode(b"", final=True):
            yield ServerEvent(OUTPUT, web.OutputEvent(stream=stream, text=text))


def given_of(call: WebCall, policy: Policy, language: str = "python") -> CallArguments:
    """Return the arguments of a call; raises PolicyError for packages that clients may not choose."""
    body: web.ExecuteBody = call.body
    refuse_packages(policy, body.packages)
    return body.call(call.traceparent, language)


EXECUTION_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/executions", "Run a program in a fresh cell, and answer when it has ended.",
        web.ExecutionAnswer, web.ExecuteBody, handler=execute, executes=True,
    ),
    Endpoint(
        "POST", "/v1/executions/stream",
        "Run a program in a fresh cell: `started`, `output` as it comes, and `result`.",
        web.ExecutionAnswer, web.ExecuteBody, stream=stream_execution, executes=True,
    ),
)  # fmt: skip


_VERSION = "{}.{}".format(*sys.version_info[:2])  # version of the Python that runs cells
_SHORT_VERSION = re.compile(r"3\.[0-9]{1,2}")
_FAILED, _TIMEOUT, _SIGNALLED, _KILLED = 1, 124, 128, 137  # a shell and timeout(1) exit with these
_STATUS_OF = {"timeout": _TIMEOUT, "killed": _KILLED, "cancelled": _KILLED}


def run_code(call: WebCall) -> web.RunCodeAnswer:
    """Run a program; programs with the same `sessionId` share variables and files."""
    body: web.RunCodeBody = call.body
    language, python = _language_and_version(body.runtime)
    sandbox = call.state.services.sandbox_of(call.client, python)
    refuse_packages(sandbox.policy, body.packages)
    executing: Executing = sandbox
    if body.session_id:
        name = f"{body.session_id}@{body.runtime}" if python else body.session_id
        executing = call.state.sessions.named(call, name, sandbox, language, body.packages)
    given = CallArguments(
        code=body.code, language=language, packages=() if body.session_id else body.packages,
        trace_id=body.trace_id or call.traceparent or None,
    )  # fmt: skip
    return _answer(executing._execute(replace(given, cancel=call.stop)).for_model())


def _language_and_version(runtime: str) -> tuple[str, str]:
    """Return the language of a runtime, and the version of Python if it differs from the server's;
    raises PolicyError for one that this host cannot run. A client cannot name a path."""
    language, colon, version = runtime.partition(":")
    if not colon or (language, version) == (PYTHON, _VERSION):
        return language, ""
    if language != PYTHON:
        raise PolicyError(f"runtime: only python has versions, got {runtime!r}", "leave it out")
    try:
        if not _SHORT_VERSION.fullmatch(version):
            raise PolicyError("must be such as python:3.12")
        find_python(version)
    except CellwrightError as error:
        there = ", ".join(f"python:{each}" for each in _versions())
        raise PolicyError(
            f"runtime: cannot run {runtime!r}: {error.what}", f"this server has {there}"
        ) from None
    return language, version


def _versions() -> list[str]:
    usable = [each.version for each in pythons() if None not in each.packages]
    return sorted({f"{major}.{minor}" for major, minor, *_ in usable} | {_VERSION}, key=len)


def _answer(result: SandboxResult) -> web.RunCodeAnswer:
    return web.RunCodeAnswer(
        exit_code=_exit_code(result), stdout=result.stdout, stderr=_stderr(result),
        duration_ms=round(result.execution_time * 1000, 3),
        memory_usage=result.usage.memory_peak_bytes, status=result.status.value,
        reason=result.reason, trace_id=span_of(result.trace_id).trace_id,
    )  # fmt: skip


def _exit_code(result: SandboxResult) -> int:
    """Return 0 only for a program that succeeded: a caller looks at nothing else."""
    if result.ok:
        return 0
    if result.signal:
        return _SIGNALLED + result.signal
    return result.exit_code or _STATUS_OF.get(result.status.value, _FAILED)


def _stderr(result: SandboxResult) -> str:
    """Return standard error, and the reason of a failure that the program did not print."""
    error = (result.traceback or result.error or "").strip()
    if result.ok or not error or error in result.stderr:
        return result.stderr
    return f"{result.stderr}cellwright: {result.status.value} ({result.reason}): {error}\n"


CODE_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/run-code",
        "Run a program, as a thin plugin asks for it: `exitCode` is 0 only if it succeeded.",
        web.RunCodeAnswer, web.RunCodeBody, handler=run_code, executes=True,
    ),
)  # fmt: skip


_DOWNLOAD_BYTES = 64 * 1024 * 1024


def open_session(call: WebCall) -> web.SessionAnswer:
    """Open a session."""
    body: web.OpenSessionBody = call.body
    sandbox = call.state.services.of(call.client).sandbox
    refuse_packages(sandbox.policy, body.packages)
    return _about(call.state.sessions.open(call, sandbox, body.language, body.packages))


def list_sessions(call: WebCall) -> web.SessionsAnswer:
    """List the client's sessions."""
    return web.SessionsAnswer(
        sessions=[
            web.SessionAnswer(each.id, each.language, "paused" if each.is_paused else "open")
            for each in call.state.sessions.listed(call)
        ]
    )


def show_session(call: WebCall) -> web.SessionAnswer:
    """Return a session that is open."""
    return _about(_session(call))


def close_session(call: WebCall) -> None:
    """End a session."""
    call.state.sessions.close(call, call.path["session"])


def branch_session(call: WebCall) -> web.SessionsAnswer:
    """Open sessions that go on from the state of another one."""
    body: web.BranchBody = call.body
    made = call.state.sessions.branch(call, call.path["session"], body.n)
    return web.SessionsAnswer(sessions=[_about(each) for each in made])


def pause_session(call: WebCall) -> None:
    """Keep a session on disk, without a cell, until its next request."""
    sandbox = call.state.services.of(call.client).sandbox
    call.state.sessions.pause(call, call.path["session"], sandbox)


def execute_in_session(call: WebCall) -> web.ExecutionAnswer:
    """Run a program with the state that earlier ones left."""
    session = _session(call)
    given = given_of(call, call.state.services.of(call.client).sandbox.policy, session.language)
    return web.execution_answer(session._execute(replace(given, cancel=call.stop)).for_model())


async def stream_in_session(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Run a program in a session, and send its output as it comes."""
    services = await run_in_thread(call.state.services.of, call.client)
    session = await run_in_thread(_session, call)  # may resume the session from disk
    given = given_of(call, services.sandbox.policy, session.language)
    async for event in stream_of(session, given):
        yield event


def list_files(call: WebCall) -> web.FilesAnswer:
    """List the files below /workspace."""
    return web.FilesAnswer(files=_session(call).files())


def download(call: WebCall) -> ContentAnswer:
    """Return a file below /workspace."""
    session, path = _session(call), call.path["file"]
    sizes = {file.path: file.size_bytes for file in session.files()}
    _check_size(path, sizes.get(path, 0))
    call.answer_bytes.grow_to(sizes.get(path, 0))
    data = session.download(path)
    _check_size(path, len(data))  # the path was spelled differently, or the file has grown
    return ContentAnswer(data, path)


def upload(call: WebCall) -> None:
    """Write a file below /workspace."""
    _session(call).upload(call.path["file"], call.body)


def _check_size(path: str, size: int) -> None:
    if size > _DOWNLOAD_BYTES:
        words = f"{path}: {size} bytes, more than the {_DOWNLOAD_BYTES} of one answer"
        raise WorkspaceError(words, "split it with a program")


def _session(call: WebCall) -> Session:
    return call.state.sessions.get(call, call.path["session"])


def _about(session: Session) -> web.SessionAnswer:
    return web.SessionAnswer(session=session.id, language=session.language)


_ONE = "/v1/sessions/{session}"
SESSION_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/sessions", "Open a session.", web.SessionAnswer, web.OpenSessionBody,
        handler=open_session, status=201,
    ),
    Endpoint("GET", "/v1/sessions", "List your sessions.", web.SessionsAnswer, handler=list_sessions),
    Endpoint("GET", _ONE, "Return a session that is open.", web.SessionAnswer, handler=show_session),
    Endpoint("DELETE", _ONE, "End a session.", handler=close_session, status=204),
    Endpoint(
        "POST", f"{_ONE}/branches", "Open sessions that go on from the state of this one.",
        web.SessionsAnswer, web.BranchBody, handler=branch_session, status=201,
    ),
    Endpoint(
        "POST", f"{_ONE}/pause", "Keep a session on disk until its next request.",
        handler=pause_session, status=204,
    ),
    Endpoint(
        "POST", f"{_ONE}/executions", "Run a program with the state that earlier ones left.",
        web.ExecutionAnswer, web.ExecuteBody, handler=execute_in_session, executes=True,
    ),
    Endpoint(
        "POST", f"{_ONE}/executions/stream", "Run a program in a session, as a stream.",
        web.ExecutionAnswer, web.ExecuteBody, stream=stream_in_session, executes=True,
    ),
    Endpoint(
        "GET", f"{_ONE}/files", "List the files below /workspace.", web.FilesAnswer, handler=list_files
    ),
    Endpoint(
        "GET", f"{_ONE}/files/{{file:path}}", "Return a file below /workspace.", bytes,
        handler=download,
    ),
    Endpoint(
        "PUT", f"{_ONE}/files/{{file:path}}", "Write a file below /workspace.", takes=bytes,
        handler=upload, status=204,
    ),
)  # fmt: skip

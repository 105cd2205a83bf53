"""Sessions: programs that keep their state, and their files.  Each belongs to the client that opened
it."""

from collections.abc import AsyncIterator

from ....policies.errors import WorkspaceError
from ...sandbox.session import Session
from ..client_turns import run_in_thread
from ..services import refuse_packages
from .endpoint import ContentAnswer, Endpoint, ServerEvent, WebCall
from .execution_endpoints import given_of, stream_of
from .messages import (
    BranchBody,
    ExecuteBody,
    ExecutionAnswer,
    FilesAnswer,
    OpenSessionBody,
    SessionAnswer,
    SessionsAnswer,
    execution_answer,
)

_DOWNLOAD_BYTES = 64 * 1024 * 1024


def open_session(call: WebCall) -> SessionAnswer:
    """Open a session."""
    body: OpenSessionBody = call.body
    sandbox = call.state.services.of(call.client).sandbox
    refuse_packages(sandbox.policy, body.packages)
    return _about(call.state.sessions.open(call, sandbox, body.language, body.packages))


def list_sessions(call: WebCall) -> SessionsAnswer:
    """List the client's sessions."""
    return SessionsAnswer(
        sessions=[
            SessionAnswer(each.id, each.language, "paused" if each.is_paused else "open")
            for each in call.state.sessions.listed(call)
        ]
    )


def show_session(call: WebCall) -> SessionAnswer:
    """Return a session that is open."""
    return _about(_session(call))


def close_session(call: WebCall) -> None:
    """End a session."""
    call.state.sessions.close(call, call.path["session"])


def branch_session(call: WebCall) -> SessionsAnswer:
    """Open sessions that go on from the state of another one."""
    body: BranchBody = call.body
    made = call.state.sessions.branch(call, call.path["session"], body.n)
    return SessionsAnswer(sessions=[_about(each) for each in made])


def pause_session(call: WebCall) -> None:
    """Keep a session on disk, without a cell, until its next request."""
    sandbox = call.state.services.of(call.client).sandbox
    call.state.sessions.pause(call, call.path["session"], sandbox)


def execute_in_session(call: WebCall) -> ExecutionAnswer:
    """Run a program with the state that earlier ones left."""
    session = _session(call)
    given = given_of(call, call.state.services.of(call.client).sandbox.policy, session.language)
    return execution_answer(session._execute(given, None, call.stop).for_model())


async def stream_in_session(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Run a program in a session, and send its output as it comes."""
    services = await run_in_thread(call.state.services.of, call.client)
    session = await run_in_thread(_session, call)  # which may resume it from disk
    given = given_of(call, services.sandbox.policy, session.language)
    async for event in stream_of(session, given):
        yield event


def list_files(call: WebCall) -> FilesAnswer:
    """List the files below /workspace."""
    return FilesAnswer(files=_session(call).files())


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


def _about(session: Session) -> SessionAnswer:
    return SessionAnswer(session=session.id, language=session.language)


_ONE = "/v1/sessions/{session}"
SESSION_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/sessions", "Open a session.", SessionAnswer, OpenSessionBody,
        handler=open_session, status=201,
    ),
    Endpoint("GET", "/v1/sessions", "List your sessions.", SessionsAnswer, handler=list_sessions),
    Endpoint("GET", _ONE, "Return a session that is open.", SessionAnswer, handler=show_session),
    Endpoint("DELETE", _ONE, "End a session.", handler=close_session, status=204),
    Endpoint(
        "POST", f"{_ONE}/branches", "Open sessions that go on from the state of this one.",
        SessionsAnswer, BranchBody, handler=branch_session, status=201,
    ),
    Endpoint(
        "POST", f"{_ONE}/pause", "Keep a session on disk until its next request.",
        handler=pause_session, status=204,
    ),
    Endpoint(
        "POST", f"{_ONE}/executions", "Run a program with the state that earlier ones left.",
        ExecutionAnswer, ExecuteBody, handler=execute_in_session, executes=True,
    ),
    Endpoint(
        "POST", f"{_ONE}/executions/stream", "Run a program in a session, as a stream.",
        ExecutionAnswer, ExecuteBody, stream=stream_in_session, executes=True,
    ),
    Endpoint(
        "GET", f"{_ONE}/files", "List the files below /workspace.", FilesAnswer, handler=list_files
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

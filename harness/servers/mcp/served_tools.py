"""The nine tools that clients see, whatever the catalogue holds: a list that changes would cost every
client its prompt cache, and the protocol forbids one that differs by connection.

`run_code` runs programs in fresh cells and in sessions, and pauses those that need approval;
`sessions`, `list_files`, `download_file` and `upload_file` are about sessions.
"""

import base64
import binascii
import functools
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from mcp import types
from msgspec import UNSET

from ....policies.errors import PolicyError, WorkspaceError
from ....runner.cells.workspace import Artifact
from ....runner.host.interpreters import HostLanguage
from ....runner.requests.result import SandboxResult, SandboxStatus
from ...runs.durable_runs import RunAttempt, Runs
from ...runs.run_store import Approval
from ...sandbox.calls.executing import Executing
from ...sandbox.parameters import CallArguments
from ...sandbox.sessions.session import Session
from ..served_requests import CancellableExecuting, refuse_packages
from ..services import ClientServices, ListedSession
from . import answers, catalogue_tools
from . import catalogue_tools as tool_arguments
from .answers import (
    Downloaded,
    FileList,
    SessionList,
    Uploaded,
    answered,
    block_of,
    fitted,
    ran,
    visible,
)
from .approvals import DECLINED, ApprovalQuestion, Verdicts
from .call_runner import CallContext, Outcome, PausedCall, RequestControl
from .catalogue_tools import (
    NEW,
    DownloadFileArguments,
    ListFilesArguments,
    RunCodeArguments,
    SessionsArguments,
    UploadFileArguments,
    load_skill,
    save_skill,
    schema_of,
)


def run_code(asked: RunCodeArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Run a program; its failure is in the answer.  Raises what `execute` raises."""
    sandbox = call.services.sandbox
    refuse_packages(sandbox.policy, asked.packages)
    if asked.session:
        return _in_session(asked, call, control)
    executing = _cancellable(sandbox, control)
    given = _given(asked, call, asked.language)
    if call.can_ask:
        with _forgotten_on_error(call.runs):
            return _outcome(call, call.runs._begin(executing, given))
    return _ran(call, executing._execute(given))


def _given(asked: RunCodeArguments, call: CallContext, language: str) -> CallArguments:
    """Return the arguments of the execution of a program in `language`."""
    # compilers see the files too, which may be headers and other sources
    is_compiled = not asked.session and call.services.sandbox.compiles(language)
    return CallArguments(
        code=asked.code, language=language, files=asked.files, collect=asked.collect,
        sources=asked.files if is_compiled else None, stdin=asked.stdin or None,
        timeout=None if asked.timeout is msgspec.UNSET else asked.timeout,
        packages=() if asked.session else asked.packages,  # a session already has its packages
        trace_id=call.traceparent,
    )  # fmt: skip


def _in_session(asked: RunCodeArguments, call: CallContext, control: RequestControl) -> Outcome:
    owner, sandbox = call.owner, call.services.sandbox
    if asked.session == NEW:
        session = call.sessions.open(owner, sandbox, asked.language, asked.packages)
    elif asked.packages:
        raise PolicyError('packages: only with session="new", or without a session')
    else:
        session = call.sessions.get(owner, asked.session)
    given = _given(asked, call, session.language)
    return _ran(call, _cancellable(session, control)._execute(given), session.id)


def _outcome(call: CallContext, attempt: RunAttempt) -> Outcome:
    run = attempt.run
    if attempt.result.status is not SandboxStatus.PENDING:
        call.runs.forget(run)
        unused = [f"not called again: {each}" for each in attempt.unused]
        return _ran(call, attempt.result, notes=unused)
    questions = [
        ApprovalQuestion(
            each.approval, each.tool, _as_the_tool_gets(call.services, each), each.reason
        )
        for each in call.runs.pending() if each.run == run
    ]  # fmt: skip
    go_on = functools.partial(_go_on, call, run)
    return PausedCall(questions, go_on, functools.partial(call.runs.forget, run))


def _go_on(call: CallContext, run: str, verdicts: Verdicts, control: RequestControl) -> Outcome:
    for approval, approved in verdicts.items():
        if approved:
            call.runs.approve(approval)
        else:
            call.runs.reject(approval, DECLINED)
    with _forgotten_on_error(call.runs):
        executing = _cancellable(call.services.sandbox, control)
        return _outcome(call, call.runs.resume(executing, run))


@contextmanager
def _forgotten_on_error(runs: Runs) -> Iterator[None]:
    """Forget a run if an exception ends the block."""
    try:
        yield
    except BaseException:
        runs.forget()
        raise


def _as_the_tool_gets(services: ClientServices, approval: Approval) -> dict[str, Any]:
    """Return the arguments of a call that waits, for the person: with the values that it restores."""
    if services.privacy is None:
        return approval.arguments
    return services.privacy.restored(approval.tool, approval.arguments, None).arguments


def _ran(
    call: CallContext, result: SandboxResult, session: str = "", notes: Sequence[str] = ()
) -> Outcome:
    policy, most = call.services.sandbox.policy, call.owner.answer_bytes
    return ran(result.for_model(), session, [*notes, *_notes(call.services, result)], most, policy)


def _notes(services: ClientServices, result: SandboxResult) -> list[str]:
    """Return a note if the cell cut the value, which was too large, to the start of its repr."""
    most = services.sandbox.policy.limits.value_bytes
    if not isinstance(result.value, str) or len(result.value.encode("utf-8", "replace")) < most - 3:
        return []
    return [f"value: more than {most} bytes: only the beginning of its repr"]


def _cancellable(executing: Executing, control: RequestControl) -> CancellableExecuting:
    """Return the executor of a request, which reports output and ends with the request."""
    return CancellableExecuting(executing, control.stop, control.on_output)


_DOWNLOAD_BYTES = 8 * 1024 * 1024
_UNLISTED = "sessions cannot be listed over this protocol: use their ids"


def sessions(asked: SessionsArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Close, branch or pause the named sessions if any, and list those that exist then.

    Only one of the three is done in one call: if it fails, nothing was done.
    """
    if sum(map(bool, (asked.close, asked.branch, asked.pause))) > 1:
        raise PolicyError("sessions: give one of close, branch and pause")
    owner = call.owner
    made: tuple[Session, ...] = ()
    if asked.close:
        call.sessions.close(owner, asked.close)
    elif asked.pause:
        call.sessions.pause(owner, asked.pause, call.services.sandbox)
    elif asked.branch:
        made = call.sessions.branch(owner, asked.branch, asked.branches)
    listed = call.sessions.listed(owner) if owner.may_list else []
    return answered(
        SessionList(
            sessions=list(map(_summary, listed)), branches=[each.id for each in made],
            hint="" if owner.may_list else _UNLISTED,
        )
    )  # fmt: skip


def _summary(session: ListedSession) -> dict[str, str]:
    told = {"id": session.id, "language": session.language}
    return told | {"state": "paused"} if session.is_paused else told


def list_files(asked: ListFilesArguments, call: CallContext, control: RequestControl) -> Outcome:
    """List the files of a session."""
    files = call.sessions.get(call.owner, asked.session).files()
    told = {"files": visible({file.path: file.size_bytes for file in files})}
    parts, cut = fitted(told, call.owner.answer_bytes)
    return answered(FileList(hint="; ".join(cut), **parts))


def download_file(
    asked: DownloadFileArguments, call: CallContext, control: RequestControl
) -> Outcome:
    """Return a file: as an image if it is one, else as a resource."""
    session = call.sessions.get(call.owner, asked.session)
    sizes = {file.path: file.size_bytes for file in session.files()}
    most = min(_DOWNLOAD_BYTES, call.owner.answer_bytes * 7 // 10)  # base64 takes 4 bytes for 3
    _check_size(asked.path, sizes.get(asked.path, 0), most)
    data = session.download(asked.path)
    _check_size(
        asked.path, len(data), most
    )  # the path was spelled differently, or the file has grown
    mime = mimetypes.guess_type(f"/{asked.path}")[0] or "application/octet-stream"
    artifact = Artifact(asked.path, mime, data)
    return answered(
        Downloaded(path=asked.path, bytes=len(data)), [block_of(artifact, asked.session)]
    )


def _check_size(path: str, size: int, most: int) -> None:
    if size > most:
        raise WorkspaceError(
            f"{path}: {size} bytes, more than the {most} of one answer",
            "split it with a program",
        )


def upload_file(asked: UploadFileArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Put a file into a session."""
    data = _content(asked)
    call.sessions.get(call.owner, asked.session).upload(asked.path, data)
    return answered(Uploaded(path=asked.path, bytes=len(data)))


def _content(asked: UploadFileArguments) -> bytes:
    if (asked.text is UNSET) == (asked.base64 is UNSET):
        raise PolicyError("upload_file: give either text or base64")
    if asked.base64 is UNSET:
        return str(asked.text).encode("utf-8", "replace")
    try:
        return base64.b64decode(str(asked.base64), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PolicyError(f"base64: {error}") from None


class ServedTool(NamedTuple):
    """A tool.  `hints` are read_only, destructive and idempotent; `reaches`: tools that it calls may
    act outside this host."""

    name: str
    description: str
    takes: type[tool_arguments.Arguments]
    gives: type[answers.ToolAnswer]
    hints: tuple[bool, bool, bool]
    carry_out: Callable[[Any, CallContext, RequestControl], Outcome]
    reaches: bool = False


_READS = (True, False, True)
_ACTS = (False, True, False)
_ADDS = (False, False, True)
_REPLACES = (False, True, True)

SERVED_TOOLS = (
    ServedTool(
        "search_tools",
        "Find tools by what they do, or by name.",
        tool_arguments.SearchToolsArguments,
        answers.FoundTools,
        _READS,
        catalogue_tools.search,
    ),
    ServedTool(
        "describe_tools",
        "Tell the parameters and results of tools.",
        tool_arguments.DescribeToolsArguments,
        answers.DescribedTools,
        _READS,
        catalogue_tools.describe,
    ),
    ServedTool(
        "run_code",
        "Run python or another language in a sandbox. Python and javascript can call tools.",
        tool_arguments.RunCodeArguments,
        answers.Ran,
        _ACTS,
        run_code,
        reaches=True,
    ),
    ServedTool(
        "call_tool",
        "Call one tool.",
        tool_arguments.CallToolArguments,
        answers.Called,
        _ACTS,
        catalogue_tools.call_tool,
        reaches=True,
    ),
    ServedTool(
        "create_tool",
        "Test a Python function in a sandbox and keep it as a tool.",
        tool_arguments.CreateToolArguments,
        answers.Created,
        _ADDS,
        catalogue_tools.create,
    ),
    ServedTool(
        "sessions",
        "List your sessions. End, branch or pause one.",
        tool_arguments.SessionsArguments,
        answers.SessionList,
        _ACTS,
        sessions,
    ),
    ServedTool(
        "list_files",
        "List a session's files.",
        tool_arguments.ListFilesArguments,
        answers.FileList,
        _READS,
        list_files,
    ),
    ServedTool(
        "download_file",
        "Get a file of a session.",
        tool_arguments.DownloadFileArguments,
        answers.Downloaded,
        _READS,
        download_file,
    ),
    ServedTool(
        "upload_file",
        "Put a file, text or base64, into a session.",
        tool_arguments.UploadFileArguments,
        answers.Uploaded,
        _REPLACES,
        upload_file,
    ),
)
BY_NAME = {each.name: each for each in SERVED_TOOLS}
LOAD_SKILL = ServedTool(
    "load_skill",
    "Get the instructions of a skill, or a file of it.",
    tool_arguments.LoadSkillArguments,
    answers.LoadedSkill,
    _READS,
    load_skill,
)
SAVE_SKILL = ServedTool(
    "save_skill",
    "Keep what a session did as a skill, once it works in a fresh cell.",
    tool_arguments.SaveSkillArguments,
    answers.SavedSkill,
    _ADDS,
    save_skill,
)
OF_SKILLS = (LOAD_SKILL, SAVE_SKILL)  # only where the server offers skills


def served_tools(
    *, open_world: bool, has_skills: bool = False, languages: Sequence[HostLanguage] = ()
) -> list[types.Tool]:
    """Return the list; `open_world`: other servers' tools are in the catalogue.  `languages`: those of
    the host, which does not change."""
    served = (*SERVED_TOOLS, *OF_SKILLS) if has_skills else SERVED_TOOLS
    tools = [_tool(each, open_world=open_world and each.reaches) for each in served]
    if languages:
        run = next(each for each in tools if each.name == "run_code")
        run.input_schema["properties"]["language"] |= _choice(languages)
    return tools


def _choice(languages: Sequence[HostLanguage]) -> dict[str, Any]:
    here = [each for each in languages if not each.missing]
    last = [each.name for each in here if each.kind == "sessions"][-1]
    described = f"only those up to {last} have sessions"
    return {"enum": [each.name for each in here], "description": described}


def _tool(definition: ServedTool, *, open_world: bool) -> types.Tool:
    read_only, destructive, idempotent = definition.hints
    return types.Tool(
        name=definition.name,
        description=definition.description,
        input_schema=schema_of(definition.takes),
        output_schema=schema_of(definition.gives),
        annotations=types.ToolAnnotations(
            read_only_hint=read_only,
            destructive_hint=None if read_only else destructive,
            idempotent_hint=None if read_only else idempotent,
            open_world_hint=open_world,
        ),
    )

"""The bodies of requests and answers.  Unknown fields are refused."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....runner.audit.record import span_of
from ....runner.cells.workspace import WorkspaceFile
from ....runner.requests.result import SandboxResult, Violation
from ....runner.settings import MOST_BRANCHES
from ...sandbox.parameters import CallArguments, FileContent
from ..served_requests import plain

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Language = Annotated[
    str, Meta(max_length=32, description="default: python; GET /v1/server names all")
]


class WebBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request."""


class FileContent64(WebBody, frozen=True):
    """The content of a file that is not text."""

    base64: bytes


class ExecuteBody(WebBody, frozen=True):
    """A program; `files` are paths below /workspace, `collect` are globs of files to return."""

    code: str
    language: Language | UnsetType = UNSET
    stdin: str | None = None
    arguments: list[str] = []
    inputs: dict[str, Any] | None = None
    files: dict[str, str | FileContent64] = {}
    env: dict[str, str] | None = None
    timeout: Seconds | None = None
    collect: list[str] = []
    packages: list[str] = []
    plain: bool = False

    def call(self, traceparent: str, language: str = "python") -> CallArguments:
        """Return the arguments of the execution."""
        files: dict[str, FileContent] = {
            path: each if isinstance(each, str) else each.base64
            for path, each in self.files.items()
        }
        return CallArguments(
            code=self.code, language=language if self.language is UNSET else self.language,
            stdin=self.stdin, arguments=self.arguments, inputs=self.inputs, files=files, env=self.env,
            timeout=self.timeout, collect=self.collect, packages=self.packages, plain=self.plain,
            trace_id=traceparent or None,
        )  # fmt: skip


class WebAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer."""


class ReturnedFile(WebAnswer, frozen=True):
    """A file that `collect` named, in base64."""

    path: str
    mime: str
    base64: bytes


class ExecutionAnswer(WebAnswer, frozen=True):
    """The result of a program: `value` is that of its last expression, `error` the traceback or reason.

    `truncated` counts the bytes of each stream that were dropped, `files` are those that were made or
    changed.
    """

    status: str
    reason: str
    ok: bool
    stdout: str
    stderr: str
    value: Any
    error: str
    exit_code: int | None
    wall_seconds: float
    cpu_seconds: float
    memory_peak_bytes: int
    violations: tuple[Violation, ...]
    files: tuple[WorkspaceFile, ...]
    returned: list[ReturnedFile]
    truncated: dict[str, int]
    notices: list[str]
    layers: tuple[str, ...]
    execution_id: str
    trace_id: str
    session_lost: bool


def execution_answer(result: SandboxResult) -> ExecutionAnswer:
    """Return a result as an answer."""
    usage = result.usage
    uncollected = [
        f"{each.path or 'files'}: not collected: {each.why}" for each in result.uncollected
    ]
    return ExecutionAnswer(
        status=result.status.value, reason=result.reason, ok=result.ok, stdout=result.stdout,
        stderr=result.stderr, value=plain(result.value),
        error=result.traceback or result.error or "", exit_code=result.exit_code,
        wall_seconds=round(result.execution_time, 6),
        cpu_seconds=round(usage.cpu_user_seconds + usage.cpu_system_seconds, 6),
        memory_peak_bytes=usage.memory_peak_bytes, violations=result.violations, files=result.files,
        returned=[
            ReturnedFile(path=each.name, mime=each.mime, base64=each.data)
            for each in result.artifacts
        ],
        truncated=result.truncated,
        notices=[*result.notices, *(() if result.ok else result.hints), *uncollected],
        layers=result.layers, execution_id=result.execution_id,
        trace_id=span_of(result.trace_id).trace_id, session_lost=result.session_lost,
    )  # fmt: skip


class ServerLanguage(WebAnswer, frozen=True):
    """A language that this host has; `kind` is sessions, or compiled or interpreted: without them."""

    name: str
    kind: str


class ServerAnswer(WebAnswer, frozen=True):
    """This server: its version, the policy of every cell, and the languages of programs."""

    version: str
    policy: str
    layers: tuple[str, ...]
    languages: tuple[ServerLanguage, ...]
    client: str
    is_operator: bool


class StartedEvent(WebAnswer, frozen=True):
    """The first event of a stream."""


class OutputEvent(WebAnswer, frozen=True):
    """A piece of a program's output."""

    stream: str
    text: str


class RunCodeBody(WebBody, frozen=True, rename="camel"):
    """A program of a thin plugin; `runtime` is a language, or `python:` and the server's version."""

    code: str
    session_id: Annotated[str, Meta(max_length=256)] = ""
    trace_id: Annotated[str, Meta(max_length=256)] = ""
    runtime: Annotated[str, Meta(max_length=64)] = "python"
    packages: list[str] = []


class RunCodeAnswer(WebAnswer, frozen=True, rename="camel"):
    """`exitCode` is 0 only if the program succeeded; `memoryUsage` is its peak in bytes."""

    exit_code: int
    stdout: str
    stderr: str
    duration_ms: float
    memory_usage: int
    status: str
    reason: str
    trace_id: str


class OpenSessionBody(WebBody, frozen=True):
    """The language of a session, and packages that its programs can import."""

    language: Annotated[str, Meta(max_length=32)] = "python"
    packages: list[str] = []


class BranchBody(WebBody, frozen=True):
    """The number of sessions that go on from the state of this one."""

    n: Annotated[int, Meta(ge=1, le=MOST_BRANCHES)] = 1


class SessionAnswer(WebAnswer, frozen=True):
    """A session; the next request resumes a paused one."""

    session: str
    language: str
    state: Literal["open", "paused"] = "open"


class SessionsAnswer(WebAnswer, frozen=True):
    sessions: list[SessionAnswer]


class FilesAnswer(WebAnswer, frozen=True):
    files: tuple[WorkspaceFile, ...]


class ToolQuery(WebBody, frozen=True):
    query: Annotated[str, Meta(max_length=4096)] = ""
    limit: Annotated[int, Meta(ge=1, le=500)] = 50


class ToolSummary(WebAnswer, frozen=True):
    name: str
    summary: str


class ToolsAnswer(WebAnswer, frozen=True):
    tools: list[ToolSummary]
    more: bool
    hint: str = ""


class ToolDescription(WebAnswer, frozen=True):
    """A tool; `parameters` and `result` are JSON Schemas, and `risky` calls need approval."""

    name: str
    description: str
    parameters: dict[str, Any]
    result: dict[str, Any]
    risky: bool
    owner: str
    state: str
    version: int


class CallToolBody(WebBody, frozen=True):
    arguments: dict[str, Any] = {}


class ToolResultAnswer(WebAnswer, frozen=True):
    result: Any


class CreateToolBody(WebBody, frozen=True):
    """Python that defines a function of that name; `tests` are programs that assert, `requirements`
    packages that it imports, of those that the policy allows."""

    name: Name
    source_code: str
    description: str = ""
    tests: Annotated[list[str], Meta(max_length=64)] | None = None
    calls: Annotated[list[Name], Meta(max_length=64)] = []
    requirements: Annotated[list[Name], Meta(max_length=64)] = []
    allow_similar: bool = False


class SkillSummary(WebAnswer, frozen=True):
    name: str
    description: str


class SkillsAnswer(WebAnswer, frozen=True):
    skills: list[SkillSummary]


class SkillAnswer(WebAnswer, frozen=True):
    name: str
    text: str


class ApprovalAnswer(WebAnswer, frozen=True):
    """A call that waits for a person until `expires`, in seconds since the epoch.

    `arguments` are exactly those that the call will have; `shown` is their text for a person, with
    hidden characters escaped.  A decision repeats `digest`.
    """

    approval: str
    run: str
    client: str
    tool: str
    arguments: dict[str, Any]
    shown: str
    digest: str
    description: str
    reason: str
    asked: float
    expires: float


class ApprovalsAnswer(WebAnswer, frozen=True):
    approvals: list[ApprovalAnswer]


class DecisionBody(WebBody, frozen=True):
    """A decision about exactly the call with this `digest`; a program reads the `reason` of a no."""

    approve: bool
    digest: Annotated[str, Meta(max_length=128)]
    reason: Annotated[str, Meta(max_length=1000)] = ""


class DecisionAnswer(WebAnswer, frozen=True):
    approval: str
    approved: bool
    run: str


class RunStateAnswer(WebAnswer, frozen=True):
    """A run; `began` is in seconds since the epoch, `ending` says how its last attempt ended."""

    run: str
    client: str
    state: str
    began: float
    language: str
    ending: str


class RunsAnswer(WebAnswer, frozen=True):
    runs: list[RunStateAnswer]


class RunCallAnswer(WebAnswer, frozen=True):
    """A recorded call; `answer` is JSON, or the text of the error."""

    number: int
    tool: str
    arguments: dict[str, Any]
    state: str
    answer: str


class RunRecordAnswer(WebAnswer, frozen=True):
    run: RunStateAnswer
    calls: list[RunCallAnswer]
    approvals: list[ApprovalAnswer]
    actions: tuple[str, ...]


class RunAnswer(WebAnswer, frozen=True):
    """The outcome of starting or resuming a run: `pending` while calls of it wait for approval."""

    run: str
    status: str
    result: ExecutionAnswer
    approvals: list[ApprovalAnswer]
    not_called_again: tuple[str, ...] = ()


class TaskBody(WebBody, frozen=True):
    task: Annotated[str, Meta(min_length=1, max_length=100_000)]


class TaskAnswer(WebAnswer, frozen=True):
    """The outcome of work on a task: completed, failed, or paused while calls wait for approval."""

    task: str
    status: str
    answer: Any
    reason: str
    steps: int
    input_tokens: int
    output_tokens: int
    approvals: list[ApprovalAnswer]


class TaskStateAnswer(WebAnswer, frozen=True):
    """A task; `began` is in seconds since the epoch."""

    task: str
    text: str
    model: str
    began: float
    state: str
    reason: str
    answer: Any


class TasksAnswer(WebAnswer, frozen=True):
    tasks: list[TaskStateAnswer]


class TaskStepAnswer(WebAnswer, frozen=True):
    """A reply of the model and its outcome."""

    number: int
    reply: str
    observation: str
    outcome: str


class TaskRecordAnswer(WebAnswer, frozen=True):
    task: TaskStateAnswer
    steps: list[TaskStepAnswer]
    approvals: list[ApprovalAnswer]


class ResumeEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer to an interrupt; the payload `{"approve": true}` approves the call."""

    interrupt_id: str
    status: Literal["resolved", "cancelled"]
    payload: Any = None


class RunAgentInput(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The request of AG-UI; unknown fields are ignored, as the protocol asks for."""

    thread_id: Annotated[str, Meta(max_length=256)]
    run_id: Annotated[str, Meta(max_length=256)]
    messages: list[dict[str, Any]]
    resume: list[ResumeEntry] | None = None

"""The bodies of requests and answers.  Unknown fields are refused."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....runner.audit.spans import span_of
from ....runner.result import SandboxResult, Violation
from ....runner.workspace import WorkspaceFile
from ...sandbox.parameters import CallArguments, FileContent
from ..plain_values import plain

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Language = Annotated[str, Meta(max_length=32, description="default: python")]


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


class ServerAnswer(WebAnswer, frozen=True):
    """This server: its version, and the policy of every cell."""

    version: str
    policy: str
    layers: tuple[str, ...]
    client: str
    is_operator: bool


class StartedEvent(WebAnswer, frozen=True):
    """The first event of a stream."""


class OutputEvent(WebAnswer, frozen=True):
    """A piece of a program's output."""

    stream: str
    text: str

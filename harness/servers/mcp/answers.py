"""Answers to tool calls, as JSON that every client can read, whatever a program made."""

import base64
import json
import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec
from mcp import types

from ....policies.policy import Policy
from ....runner.audit.spans import span_of
from ....runner.result import SandboxResult
from ....runner.workspace import Artifact
from ...text.hidden import first_hidden
from ...text.model_hints import for_model
from ...text.terminal import harmless
from ..plain_values import plain
from .answer_sizes import blocks_that_fit, fitted, size_in_answer, visible

_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


class ToolAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The structured answer of one call; empty fields are left out."""


class FoundTools(ToolAnswer, frozen=True):
    tools: list[dict[str, Any]]
    more: bool = False
    hint: str = ""


class DescribedTools(ToolAnswer, frozen=True):
    tools: list[dict[str, Any]]
    hint: str = ""


class Ran(ToolAnswer, frozen=True):
    """The answer of `run_code`: `value` is that of the last expression, `error` the traceback or
    reason, `files` those that were made or changed (path -> bytes); `notes` say what is missing, and
    why."""

    status: str
    reason: str
    stdout: str = ""
    stderr: str = ""
    value: Any = None
    error: str = ""
    session: str = ""
    usage: dict[str, Any] = {}  # seconds, bytes
    violations: list[str] = []
    files: dict[str, int] = {}
    notes: list[str] = []
    trace_id: str = ""


class Called(ToolAnswer, frozen=True):
    result: Any


class Created(ToolAnswer, frozen=True):
    name: str
    version: int
    state: str
    parameters: dict[str, Any]


class LoadedSkill(ToolAnswer, frozen=True):
    text: str


class SavedSkill(ToolAnswer, frozen=True):
    reference: str
    version: int
    hint: str = ""


class SessionList(ToolAnswer, frozen=True):
    sessions: list[dict[str, str]]
    branches: list[str] = []
    hint: str = ""


class FileList(ToolAnswer, frozen=True):
    files: dict[str, int]
    hint: str = ""


class Downloaded(ToolAnswer, frozen=True):
    path: str
    bytes: int


class Uploaded(ToolAnswer, frozen=True):
    path: str
    bytes: int


def answered(
    answer: ToolAnswer, extra: Sequence[types.ContentBlock] = (), *, failed: bool = False
) -> types.CallToolResult:
    """Return an answer as JSON, with hidden characters escaped.

    It comes twice: structured, and as text for clients that do not read structures.  A failure comes
    once, as text: all clients show that to their model, and no schema requires structure.
    """
    structured = visible(msgspec.to_builtins(answer))
    text = _encodable(json.dumps(structured, ensure_ascii=False, separators=(",", ":")))
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text), *extra],
        structured_content=None if failed else json.loads(text), is_error=failed,
    )  # fmt: skip


def refused(words: str) -> types.CallToolResult:
    """Return a refusal as text for the model."""
    text = types.TextContent(type="text", text=_encodable(harmless(words)))
    return types.CallToolResult(content=[text], is_error=True)


def ran(
    result: SandboxResult, session: str, notes: Sequence[str], most: int, policy: Policy
) -> types.CallToolResult:
    """Return a program's result with its pictures and files, in at most `most` bytes."""
    error = result.traceback or result.error or ""
    told = visible({
        "stdout": result.stdout, "stderr": _without_traceback(result.stderr, error),
        "value": plain(result.value), "error": error,
        "violations": [
            f"{each.syscall} {' '.join(each.arguments)}: {each.rule}" for each in result.violations
        ],
        "files": {file.path: file.size_bytes for file in result.files},
    })  # fmt: skip
    parts, cut = fitted(told, most)
    answer = Ran(
        status=result.status.value, reason=result.reason, session=session, usage=_usage(result),
        trace_id=span_of(result.trace_id).trace_id, **parts,
    )  # fmt: skip
    blocks = [(each.name, block_of(each, result.execution_id)) for each in result.artifacts]
    sent, left_out = blocks_that_fit(blocks, most - sum(map(size_in_answer, parts.values())))
    told_here = [for_model(each, policy) for each in _notes(result)]
    notes = [*notes, *told_here, *cut, *left_out]
    return answered(msgspec.structs.replace(answer, notes=notes), sent, failed=not result.ok)


def _without_traceback(stderr: str, error: str) -> str:
    """Return stderr without the traceback at its end, which the answer has in `error`."""
    end = error.strip()
    return stderr.rstrip().removesuffix(end) if end and stderr.rstrip().endswith(end) else stderr


def _usage(result: SandboxResult) -> dict[str, float]:
    usage = result.usage
    return {
        "wall_seconds": round(result.execution_time, 6),
        "cpu_seconds": round(usage.cpu_user_seconds + usage.cpu_system_seconds, 6),
        "memory_peak_bytes": usage.memory_peak_bytes,
    }


def _notes(result: SandboxResult) -> list[str]:
    """Return a note for each part that is missing in the result."""
    notes = [f"{count} bytes of {name} were dropped" for name, count in result.truncated.items()]
    notes += result.notices if result.ok else (*result.notices, *result.hints)
    notes += [f"{each.path or 'files'}: not collected: {each.why}" for each in result.uncollected]
    return notes + (["the session has ended and its state is lost"] if result.session_lost else [])


def block_of(artifact: Artifact, origin: str) -> types.ContentBlock:
    """Return an artifact as an image if clients can show its type, else as a resource."""
    if artifact.mime in _PICTURES:
        data = base64.b64encode(artifact.data).decode()
        return types.ImageContent(type="image", data=data, mime_type=artifact.mime)
    return resource(artifact.name, artifact.data, artifact.mime, origin)


def resource(name: str, data: bytes, mime: str, origin: str) -> types.EmbeddedResource:
    """Return content as a resource: text if possible, else base64."""
    quoted = urllib.parse.quote(name, errors="replace")
    about: dict[str, Any] = {
        "uri": f"cellwright://{origin}/{quoted}",
        "mime_type": mime,
    }
    contents: types.TextResourceContents | types.BlobResourceContents
    text = _as_text(data)
    if text is not None:
        contents = types.TextResourceContents(text=text, **about)
    else:
        contents = types.BlobResourceContents(blob=base64.b64encode(data).decode(), **about)
    return types.EmbeddedResource(type="resource", resource=contents)


def _as_text(data: bytes) -> str | None:
    """Return content as text if it is UTF-8 without hidden characters (CRLF and a byte order mark are
    allowed), else None."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if first_hidden(text.removeprefix("\ufeff").replace("\r\n", "\n")) else text


def _encodable(text: str) -> str:
    """Return text without lone surrogates: the serializer would raise and end the server."""
    return text.encode("utf-8", "replace").decode()

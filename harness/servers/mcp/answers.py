"""Answers to tool calls, as JSON that every client can read, whatever a program made.

One cap holds for a whole answer, with a note for each part that is cut or left out.  Clients have
limits of their own: the SDK's client fails a call whose event over HTTP exceeds 1 MiB, and an answer
is in it twice, structured and as text.  With privacy, the last step before an answer leaves the server
puts tokens in place of values, whatever made the answer.
"""

import base64
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from mcp import types

from ....policies.policy import Policy
from ....runner.audit.record import span_of
from ....runner.cells.workspace import Artifact
from ....runner.requests.result import SandboxResult
from ...privacy.naming import PROGRAM
from ...privacy.scope import PrivacyScope
from ...text.hidden import first_hidden, for_model, is_hidden
from ...text.terminal_text import harmless
from ...tools.results import head_of
from ..served_requests import plain

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


_ENVELOPE_BYTES = 8192  # bytes of the message around an answer and of its short fields
_MOST_BLOCKS = 100
_MOST_NAMED = 20  # omitted blocks named one by one
_NAME_CHARACTERS = 200
_CUT = "\n[... {} characters are left out here ...]\n"


def visible(value: Any) -> Any:
    """Return a JSON value with its hidden characters (text/hidden.py) escaped.

    A model reads hidden text in an answer, and may obey it, while a person does not see it.
    """
    if isinstance(value, str):
        return harmless(value) if any(map(is_hidden, set(value))) else value
    if isinstance(value, dict):
        return {visible(key): visible(each) for key, each in value.items()}
    return [visible(each) for each in value] if isinstance(value, list | tuple) else value


def fitted(parts: Mapping[str, Any], most: int) -> tuple[dict[str, Any], list[str]]:
    """Return the parts of an answer cut to `most` bytes including the message around them, and a note
    for each cut.  A text loses its middle, any other value its end."""
    sizes = {name: size_in_answer(each) for name, each in parts.items()}
    room, kept, notes = most - _ENVELOPE_BYTES, dict(parts), []
    for count, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        share = room // (len(sizes) - count)
        if sizes[name] > share:
            kept[name], note = _cut(name, parts[name], share)
            notes.append(note)
            sizes[name] = size_in_answer(kept[name])
        room -= sizes[name]
    return kept, notes


def size_in_answer(value: Any) -> int:
    """Return how many bytes a value takes in an answer, structured and within the text."""
    text = json.dumps(value, ensure_ascii=False)
    return len(text.encode("utf-8", "replace")) + _quoted(text)


def _quoted(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))


def _cut(name: str, value: Any, share: int) -> tuple[Any, str]:
    length, kept = share, value
    while size_in_answer(kept) > share and length:
        length //= 2
        kept = _without_middle(value, length) if isinstance(value, str) else head_of(value, length)
    if isinstance(value, str):
        return kept, f"{name}: {len(value)} characters do not fit in one answer: its middle is cut"
    whole = len(json.dumps(value, ensure_ascii=False))
    return (
        kept,
        f"{name}: {whole} characters of JSON do not fit in one answer: only its beginning is here",
    )


def _without_middle(text: str, length: int) -> str:
    head, tail = text[: length // 2], text[len(text) - length // 2 :]
    return f"{head}{_CUT.format(len(text) - len(head) - len(tail))}{tail}" if length > 1 else ""


def blocks_that_fit(
    blocks: Sequence[tuple[str, types.ContentBlock]], most: int
) -> tuple[list[types.ContentBlock], list[str]]:
    """Return the named blocks that fit in `most` bytes, and notes on the others."""
    sent: list[types.ContentBlock] = []
    left_out: list[str] = []
    for name, block in blocks:
        size = size_of(block)
        if size <= most and len(sent) < _MOST_BLOCKS:
            most -= size
            sent.append(block)
        else:
            left_out.append(harmless(name)[:_NAME_CHARACTERS])
    notes = [
        f"{name} is not here: too many bytes for one answer" for name in left_out[:_MOST_NAMED]
    ]
    if more := len(left_out) - len(notes):
        notes.append(f"{more} more files are not here: too many for one answer")
    return sent, notes


def size_of(part: types.ContentBlock | types.CallToolResult) -> int:
    """Return how many bytes a part of an answer takes on the wire."""
    return len(part.model_dump_json(by_alias=True, exclude_none=True).encode())


def refused_if_too_large(result: types.CallToolResult, most: int) -> types.CallToolResult:
    """Return the answer, or an error if it is larger than clients read."""
    size = size_of(result) + _ENVELOPE_BYTES // 2
    if size <= most:
        return result
    words = (
        f"the answer has {size} bytes, more than {most}: ask for less, or call the tool from run_code "
        "and return only what you need"
    )
    return types.CallToolResult(content=[types.TextContent(type="text", text=words)], is_error=True)


def private_answer(answer: types.CallToolResult, scope: PrivacyScope) -> types.CallToolResult:
    """Return an answer with tokens in place of values."""
    structured = answer.structured_content
    shown = None if structured is None else scope.json(structured, naming=PROGRAM).value
    content = [_block(each, scope) for each in answer.content]
    if shown != structured and isinstance(content[0], types.TextContent):
        content[0] = content[0].model_copy(update={"text": _json(shown)})  # as answers.py makes it
    return answer.model_copy(update={"content": content, "structured_content": shown})


def _block(block: types.ContentBlock, scope: PrivacyScope) -> types.ContentBlock:
    if isinstance(block, types.TextContent):
        return block.model_copy(update={"text": _text(block.text, scope)})
    if isinstance(block, types.EmbeddedResource):
        return block.model_copy(update={"resource": private_resource(block.resource, scope)})
    return block


def _text(text: str, scope: PrivacyScope) -> str:
    """Return a text, which may be JSON: a number there must not become a bare word."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return scope.text(text, PROGRAM)
    replaced = scope.json(value, naming=PROGRAM)
    return _json(replaced.value) if replaced.counts else text


def private_resource(
    resource: types.TextResourceContents | types.BlobResourceContents, scope: PrivacyScope
) -> types.TextResourceContents | types.BlobResourceContents:
    """Return the content of a resource with tokens in place of values."""
    changed: dict[str, Any] = {"uri": scope.text(str(resource.uri), PROGRAM)}
    if isinstance(resource, types.TextResourceContents):
        changed["text"] = scope.text(resource.text, PROGRAM)
    else:
        content = scope.content(base64.b64decode(resource.blob), PROGRAM)
        changed["blob"] = base64.b64encode(content).decode()
    return resource.model_copy(update=changed)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

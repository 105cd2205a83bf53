"""The size of answers: one cap for a whole answer, and a note for each part that is cut or left out.

Clients have limits of their own.  The SDK's client fails a call whose event over HTTP exceeds 1 MiB,
and an answer is in it twice, structured and as text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import types

from ...text.hidden import is_hidden
from ...text.terminal import harmless
from ...tools.results import head_of

_ENVELOPE_BYTES = 8192  # of the message around an answer, and of its short fields
_MOST_BLOCKS = 100
_MOST_NAMED = 20  # blocks that are left out
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

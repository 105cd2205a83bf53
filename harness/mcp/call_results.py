"""Results of tool calls as values for programs; failures as exceptions."""

import json
from typing import Any

from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from ...policies.errors import ToolFailed, ToolResultInvalid
from ..schemas.spec import ToolSpec
from ..text.redaction import Redaction
from .definitions import shown, unwrapped
from .transports import Transport

_MOST_BLOCKS = 10_000


def value_of(result: CallToolResult, spec: ToolSpec, transport: Transport) -> Any:
    """Return the structured content if there is any; else the text of a single text block; else a list
    of blocks, in which text is str.

    Text is never parsed: the type of a value must not depend on its content.  Raises ToolFailed if the
    tool reports an error, ToolResultInvalid if its schema promises structured content and it sent none.
    """
    secrets = transport.secrets
    if result.is_error:
        words = transport.clean(_words(result))
        raise ToolFailed(f"{words}{transport.network_hint(words)}", tool=spec.name)
    if result.structured_content is not None:
        return _without(unwrapped(result.structured_content, spec.output_schema), secrets, spec)
    if spec.output_schema is not None:
        raise ToolResultInvalid(
            f"{spec.name}: its output schema requires structured content, and it sent none",
            tool=spec.name,
        )
    blocks = [_block(each) for each in result.content[:_MOST_BLOCKS]]
    alone = blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else blocks
    return _without(alone if blocks else None, secrets, spec)


def _block(block: ContentBlock) -> Any:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return {"type": block.type, "mime_type": block.mime_type, "data": block.data}
        case ResourceLink():
            return {"type": "resource_link", "uri": str(block.uri), "name": block.name}
        case EmbeddedResource(resource=inside):
            what = {"type": "resource", "uri": str(inside.uri), "mime_type": inside.mime_type}
            if isinstance(inside, TextResourceContents):
                return what | {"text": inside.text}
            return what | {"data": inside.blob}


def _words(result: CallToolResult) -> str:
    texts = [each.text for each in result.content if isinstance(each, TextContent)]
    return shown(" ".join(texts)) or "it failed and gave no reason"


def _without(value: Any, secrets: tuple[str, ...], spec: ToolSpec) -> Any:
    """Return `value` with the credentials of the connection redacted."""
    if not secrets:
        return value
    text = json.dumps(value)
    clean = Redaction(secrets).text(text)
    if clean == text:
        return value
    try:
        return json.loads(clean)
    except ValueError:  # the credential was part of a number
        raise ToolResultInvalid(
            "the result contains a credential that cannot be redacted", tool=spec.name
        ) from None

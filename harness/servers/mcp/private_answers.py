"""Answers as a model may see them: every block of an answer with tokens in place of values.

This is the last step before an answer leaves the server, whatever made it.
"""

import base64
import json
from typing import Any

from mcp import types

from ...privacy.naming import PROGRAM
from ...privacy.scope import PrivacyScope


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

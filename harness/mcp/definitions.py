"""A server's definitions of its tools: bounded, with hidden characters removed from descriptions.  A
tool with hidden characters in its name or in a value that its schema asks for is left out.

Definitions are untrusted.  Annotations are hints: `readOnlyHint` never removes the need for approval;
`destructiveHint` adds it unless the server is trusted.
"""

import fnmatch
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ...policies.errors import ToolInvalid
from ...runner.budget import Budget
from ..schemas.bounds import MAX_SCHEMA_BYTES, check_shape, check_words, size_of, texts_in
from ..schemas.spec import Provenance, ToolOwner, ToolSpec, ToolState
from ..schemas.validation import COMPILE_STEPS, compile_schema
from ..text.hidden import first_hidden, visible
from .config import ServerConfig

MAX_DEFINITION_BYTES = 2 * MAX_SCHEMA_BYTES + 128 * 1024
_TOLD_CHARACTERS = 60
_LONGEST_NAME = 128  # what MCP allows
_PINNED = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_COMMENTS = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
# Where a schema holds schemas by name, and where it holds values.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
_EXAMPLES = ("default", "examples")
_SAID = ("description", "title", "$comment")
# FastMCP wraps a value that is no object in an object with this one property, and marks the output
# schema with this key (fastmcp/tools/tool.py, from 2.10 on).
_WRAPS = "x-fastmcp-wrap-result"
_WRAPPED = "result"
_UNWRAPPED = "x-cellwright-unwrapped"  # our mark in the schema of the wrapped value
_READ_CHARACTERS = 64 * 1024  # of a text before it is cut for display


class Definition(msgspec.Struct, frozen=True):
    """A tool as its server defines it: `wire` is the server's own name, `said` the pinned fields."""

    wire: str
    said: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the hash of name, title, description, schemas and annotations."""
        text = msgspec.json.encode(self.said, order="deterministic")
        return hashlib.sha256(text).hexdigest()


def definition_of(said: object) -> Definition:
    """Return a definition that can be a tool; raises ToolInvalid with the reason otherwise.

    It has a bounded size, a name, and schemas that refer only to themselves; whether the schemas are
    valid is checked when it is first pinned (`check`).
    """
    if not isinstance(said, dict) or not size_of(said):
        raise ToolInvalid("not an object, or nested too deeply")
    kept = {key: said[key] for key in _PINNED if said.get(key) is not None}
    try:
        size = len(msgspec.json.encode(kept))
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolInvalid(f"not JSON: {error}") from None
    if size > MAX_DEFINITION_BYTES:
        raise ToolInvalid(f"{size} bytes, more than {MAX_DEFINITION_BYTES}")
    _check_parts(kept)
    return Definition(kept["name"], kept)


def _check_parts(said: dict[str, Any]) -> None:
    name = said.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ToolInvalid(f"name: must be text of 1 to {_LONGEST_NAME} characters")
    if first_hidden(name):
        raise ToolInvalid("name: contains hidden characters")
    for key in ("title", "description"):
        if not isinstance(said.get(key, ""), str):
            raise ToolInvalid(f"{key}: must be text")
    if not isinstance(said.get("annotations", {}), dict):
        raise ToolInvalid("annotations: must be an object")
    for key in ("inputSchema", "outputSchema"):
        if key in said or key == "inputSchema":
            _check_schema(said.get(key), key)


def _check_schema(schema: Any, key: str) -> None:
    try:
        check_shape(schema)
        check_words(schema)
    except ToolInvalid as error:
        raise ToolInvalid(f"{key}: {error.what}") from None
    if key == "inputSchema" and schema.get("type", "object") != "object":
        raise ToolInvalid("inputSchema: its type must be object")
    for text in texts_in(clean_schema(schema)):
        if hidden := first_hidden(text):
            raise ToolInvalid(f"{key}: hidden character {hidden!a} in {text[:_TOLD_CHARACTERS]!a}")


def check(definition: Definition, budget: Budget) -> None:
    """Raise ToolInvalid unless its schemas are valid and compile within the rest of the budget (some
    milliseconds each, once)."""
    for schema in (definition.said["inputSchema"], _output_of(definition) or {}):
        compile_schema(schema, budget.part("compiling the schema", COMPILE_STEPS))


def spec_of(definition: Definition, name: str, config: ServerConfig) -> ToolSpec:
    """Return the spec of the tool called `name`; its `function` is the server's own name."""
    said = definition.said
    output = _output_of(definition)
    return ToolSpec(
        name=name,
        description=shown(said.get("description") or said.get("title") or ""),
        parameters=clean_schema({"type": "object", **said["inputSchema"]}),
        output_schema=clean_schema(output) if output else None,
        source_hash=definition.digest,
        state=ToolState.TRUSTED if config.trusted else ToolState.DRAFT,
        owner=ToolOwner.SERVER,
        server=config.name,
        function=definition.wire,
        timeout=config.timeout,
        risky=_is_risky(definition, config),
        provenance=Provenance(maker=f"mcp:{config.name}"),
    )


def _output_of(definition: Definition) -> dict[str, Any] | None:
    """Return the output schema; for a wrapped result, the schema of the value inside."""
    schema: dict[str, Any] = definition.said.get("outputSchema") or {}
    properties = schema.get("properties")
    if schema.get(_WRAPS) is not True or not isinstance(properties, dict):
        return schema or None
    inside = properties.get(_WRAPPED)
    if len(properties) > 1 or not isinstance(inside, dict):
        return schema
    beside = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    alone = {**inside, **beside, _UNWRAPPED: True}
    try:
        check_words(alone)
    except ToolInvalid:  # it refers to the object around it
        return schema
    return alone


def unwrapped(value: Any, schema: Mapping[str, Any] | None) -> Any:
    """Return the value inside a wrapped result if `schema` (the spec's) describes that, else
    `value`."""
    holds = schema is not None and schema.get(_UNWRAPPED) is True
    if holds and isinstance(value, dict) and value.keys() == {_WRAPPED}:
        return value[_WRAPPED]
    return value


def _is_risky(definition: Definition, config: ServerConfig) -> bool:
    """Tell whether calls need approval: the user's configuration first, then the server's
    annotation."""
    if _matches(definition.wire, config.risky):
        return True
    if config.trusted or _matches(definition.wire, config.approved):
        return False
    return definition.said.get("annotations", {}).get("destructiveHint") is True


def _matches(wire: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(wire, glob) for glob in globs)


def shown(text: str) -> str:
    """Return a server's text for display: without HTML comments and hidden or reordering characters."""
    read = text[:_READ_CHARACTERS]
    return visible(_COMMENTS.sub("", visible(read, len(read))))


def clean_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with clean descriptions and without examples that have hidden characters; what it
    asks of values is unchanged."""
    return {
        key: _clean(key, value) for key, value in schema.items()
        if key not in _EXAMPLES or not any(map(first_hidden, texts_in(value)))
    }  # fmt: skip


def _clean(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if isinstance(value, str):
        return shown(value) if key in _SAID else value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _schema(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_schema(each) for each in value]
    return _schema(value)


def _schema(value: Any) -> Any:
    return clean_schema(value) if isinstance(value, dict) else value

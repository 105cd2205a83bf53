"""What a server says of its tools: bounded, rid of hidden characters; a tool with a name, or a value of
a schema, that has some is left out.

Nothing of it is believed.  Annotations are hints: `readOnlyHint` lifts no gate; `destructiveHint` adds
one, unless the server is trusted.
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
# FastMCP puts a value that is no object into an object with this one property, and says so by this
# word of the output schema (fastmcp/tools/tool.py, from 2.10 on).
_WRAPS = "x-fastmcp-wrap-result"
_WRAPPED = "result"
_UNWRAPPED = "x-cellwright-unwrapped"  # our word, in the schema of what was wrapped
_READ_CHARACTERS = 64 * 1024  # of a text that is shown: far more than is left of it


class Definition(msgspec.Struct, frozen=True):
    """A tool as its server defines it: `wire` is what the server calls it, `said` all that counts."""

    wire: str
    said: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the hash of name, title, description, schemas and annotations."""
        text = msgspec.json.encode(self.said, order="deterministic")
        return hashlib.sha256(text).hexdigest()


def definition_of(said: object) -> Definition:
    """Return what can be a tool; raises ToolInvalid, with the reason, for what cannot.

    It is small, has a name and schemas that refer to themselves alone; whether a schema is one is
    seen when it is first pinned (`check`).
    """
    if not isinstance(said, dict) or not size_of(said):
        raise ToolInvalid("it is no object, or nested too deeply")
    kept = {key: said[key] for key in _PINNED if said.get(key) is not None}
    try:
        size = len(msgspec.json.encode(kept))
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolInvalid(f"it is not JSON: {error}") from None
    if size > MAX_DEFINITION_BYTES:
        raise ToolInvalid(f"{size} bytes, more than {MAX_DEFINITION_BYTES}")
    _check_parts(kept)
    return Definition(kept["name"], kept)


def _check_parts(said: dict[str, Any]) -> None:
    name = said.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ToolInvalid(f"its name is no text of 1 to {_LONGEST_NAME} characters")
    if first_hidden(name):
        raise ToolInvalid("there are characters in its name that nobody sees")
    for key in ("title", "description"):
        if not isinstance(said.get(key, ""), str):
            raise ToolInvalid(f"{key}: no text")
    if not isinstance(said.get("annotations", {}), dict):
        raise ToolInvalid("annotations: no object")
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
        raise ToolInvalid("inputSchema: of no object")
    for text in texts_in(clean_schema(schema)):
        if hidden := first_hidden(text):
            raise ToolInvalid(
                f"{key}: {hidden!a}, which nobody sees, in {text[:_TOLD_CHARACTERS]!a}"
            )


def check(definition: Definition, budget: Budget) -> None:
    """Raise ToolInvalid unless its schemas are schemas, and can be compiled within what is left of the
    budget: some milliseconds each, once."""
    for schema in (definition.said["inputSchema"], _output_of(definition) or {}):
        compile_schema(schema, budget.part("compiling the schema", COMPILE_STEPS))


def spec_of(definition: Definition, name: str, config: ServerConfig) -> ToolSpec:
    """Return the tool called `name` as everyone else has it; `function` is what the server calls it."""
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
    """Return the output schema; of a result that is wrapped, the schema of what is in it."""
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
    """Return what a result holds if `schema`, that of the spec, is the schema of what is in it."""
    holds = schema is not None and schema.get(_UNWRAPPED) is True
    if holds and isinstance(value, dict) and value.keys() == {_WRAPPED}:
        return value[_WRAPPED]
    return value


def _is_risky(definition: Definition, config: ServerConfig) -> bool:
    """Tell whether calls have to be approved: the user's word first, then the server's."""
    if _matches(definition.wire, config.risky):
        return True
    if config.trusted or _matches(definition.wire, config.approved):
        return False
    return definition.said.get("annotations", {}).get("destructiveHint") is True


def _matches(wire: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(wire, glob) for glob in globs)


def shown(text: str) -> str:
    """Return a server's words as people see them: without comments, and what hides or reorders."""
    read = text[:_READ_CHARACTERS]
    return visible(_COMMENTS.sub("", visible(read, len(read))))


def clean_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with clean descriptions, and without examples that hide something; what it asks
    of values is as it was."""
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

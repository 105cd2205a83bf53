"""Arguments that a schema allows, made of the schema: as many of them as go together."""

from collections.abc import Mapping
from typing import Any

from cellwright.harness.schemas.spec import ToolSpec
from cellwright.harness.schemas.validation import compile_schema
from cellwright.harness.stubs.reader import part_of

_PLAIN = {"string": "text", "integer": 3, "number": 3, "boolean": True, "null": None}


def sample_of(spec: ToolSpec) -> dict[str, Any] | None:
    """Return arguments that the broker will accept, None if none were found."""
    schema = compile_schema(spec.parameters)
    properties = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", [])
    values = {name: _value(each, spec.parameters, 0) for name, each in properties.items()}
    for names in (list(properties), required):
        given = {name: values[name] for name in names}
        if not schema.complaints(given):
            return given
    return None


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > 12:
        return "text"
    if "$ref" in schema:
        return _value(part_of(root, schema["$ref"]), root, depth + 1)
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    for word in ("enum", "examples"):
        if schema.get(word):
            return schema[word][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return _value(schema[word][0], root, depth + 1)
    return _typed(schema, root, depth)


def _typed(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        return {
            name: _value(properties[name], root, depth + 1) for name in schema.get("required", [])
        }
    if kind == "array":
        return [_value(schema.get("items"), root, depth + 1)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        return max(schema.get("minimum", 3), schema.get("exclusiveMinimum", 2) + 1)
    if kind == "string":
        known = {"uuid": "6f9619ff-8b86-4011-b42d-00cf4fc964ff", "uri": "http://example.com/"}
        return known.get(
            schema.get("format", ""), "text" * max(1, schema.get("minLength", 1) // 4 + 1)
        )
    return _PLAIN.get(str(kind), "text")

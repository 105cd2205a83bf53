"""Values that parameters have by themselves, in JSON Schema.  The source is hostile and never run."""

import ast
from typing import Any

import msgspec

_MAX_BYTES = 1024
Schema = dict[str, Any]


def with_default(schema: Schema, node: ast.expr) -> Schema:
    """Return the schema of a parameter with its default; `x: int = None` takes null too."""
    default = default_of(node)
    if default == {"default": None} and schema and {"type": "null"} not in schema.get("anyOf", ()):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema | default


def default_of(node: ast.expr) -> Schema:
    """Return {"default": value} if the value of a parameter is a small one of JSON, else nothing."""
    try:
        value = ast.literal_eval(node)
        short = len(msgspec.json.encode(value)) <= _MAX_BYTES
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return {}
    return {"default": value} if short and _is_plain(value) else {}


def _is_plain(value: object) -> bool:
    """Tell whether a value is one of JSON: no bytes, no tuples, no sets."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)

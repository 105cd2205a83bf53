"""Bounds of schemas and values, checked before anything else reads them: JSON, limited in size and
depth, with references only within the schema."""

import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from ...policies.errors import ToolInvalid

MAX_SCHEMA_BYTES = 256 * 1024  # the largest schema of 900 tools of real servers has 44 KiB
_MAX_SCHEMA_OBJECTS = 5000
_MAX_SCHEMA_DEPTH = 48
_MAX_VALUE_DEPTH = 64
_MAX_IDS = 100
_MAX_ID_CHARACTERS = 500
_MAX_INDEX_DIGITS = 6
_MAX_NODES = 1_000_000
_SHOWN = 300
# Keywords that hold schemas by name, and keywords that hold values.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def size_of(value: object, depth: int = _MAX_VALUE_DEPTH, most: int = _MAX_NODES) -> int:
    """Return the number of parts of `value`; 0 if it is not JSON, is nested deeper than `depth`, or has
    more than `most` parts."""
    level: list[object] = [value]
    nodes = 0
    while level:
        nodes += len(level)
        depth -= 1
        if depth < -1 or nodes > most or not all(map(_is_json, level)):
            return 0
        level = [part for each in level for part in _parts(each)]
    return nodes


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int | list)


def check_shape(schema: object) -> bytes:
    """Return a schema as JSON.

    Raises ToolInvalid if it is not a JSON object, is too large, or is nested too deeply.
    """
    if not isinstance(schema, dict):
        raise ToolInvalid(f"schema: must be an object, got {type(schema).__name__}")
    if not size_of(
        schema, _MAX_SCHEMA_DEPTH, MAX_SCHEMA_BYTES // 2
    ):  # a part takes 2 bytes or more
        raise ToolInvalid(
            f"schema: must be JSON of at most {_MAX_SCHEMA_DEPTH} levels and {MAX_SCHEMA_BYTES} bytes"
        )
    try:
        encoded = msgspec.json.encode(schema)
    except (ValueError, TypeError, OverflowError) as error:
        raise ToolInvalid(f"schema: cannot be encoded as JSON: {error}") from None
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise ToolInvalid(f"schema: must have at most {MAX_SCHEMA_BYTES} bytes, got {len(encoded)}")
    return encoded


def check_words(schema: dict[str, Any]) -> None:
    """Raise ToolInvalid for references that lead outside or nowhere, and too many objects or `$id`s.

    The check covers every part of a schema, even one that no keyword reads: a pointer may lead to it
    and make it a schema.
    """
    objects = list(_objects(schema))
    if len(objects) > _MAX_SCHEMA_OBJECTS:
        raise ToolInvalid(
            f"schema: must have at most {_MAX_SCHEMA_OBJECTS} objects, got {len(objects)}"
        )
    anchors = {
        each[word]
        for each in objects
        for word in ("$anchor", "$dynamicAnchor")
        if isinstance(each.get(word), str)
    }
    ids = [each["$id"] for each in objects if isinstance(each.get("$id"), str)]
    # The resolver joins each $id with the ids above it and stores the result.
    if len(ids) > _MAX_IDS or any(len(id) > _MAX_ID_CHARACTERS for id in ids):
        raise ToolInvalid(
            f"schema: must have at most {_MAX_IDS} $id of at most {_MAX_ID_CHARACTERS} characters"
        )
    has_ids = any(isinstance(each.get("$id"), str) for each in objects[1:])
    for each in objects:
        # An evaluation has one dialect.
        if each is not schema and isinstance(each.get("$schema"), str):
            raise ToolInvalid("schema: $schema must stand at the top only")
        for word in _REFERENCES:
            if isinstance(target := each.get(word), str):
                _check_reference(schema, target, anchors, has_ids=has_ids)


def patterns_in(schema: dict[str, Any]) -> Iterator[str]:
    """Yield every pattern of a schema."""
    for each in _objects(schema):
        if isinstance(each.get("pattern"), str):
            yield each["pattern"]
        if isinstance(each.get("patternProperties"), dict):
            yield from each["patternProperties"]


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy in which `change` has replaced every subschema, the innermost first.

    Values, as those of `enum`, stay as they are.
    """
    if isinstance(schema, list):
        return [rewritten(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            parts[key] = {name: rewritten(each, change) for name, each in value.items()}
        else:
            parts[key] = value if key in _VALUES else rewritten(value, change)
    return change(parts)


def texts_in(value: object) -> Iterator[str]:
    """Yield every string of a JSON value, names of properties included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each
        waiting += _parts(each)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
        waiting += _parts(each)


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdecimal() and len(step) <= _MAX_INDEX_DIGITS


def _check_reference(
    schema: dict[str, Any], target: str, anchors: set[Any], *, has_ids: bool
) -> None:
    shown = ascii(target)[:_SHOWN]
    if not target.startswith("#"):
        raise ToolInvalid(f"schema: $ref {shown} leads outside: it must begin with #")
    if has_ids or target == "#" or target[1:] in anchors:
        return  # below another $id a pointer is relative to it; a dead pointer fails when it is used
    part: Any = schema
    for step in unquote(target[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and step in part:
            part = part[step]
        elif isinstance(part, list) and _is_index(step) and int(step) < len(part):
            part = part[int(step)]
        else:
            raise ToolInvalid(f"schema: $ref {shown} leads to nothing")
    if not isinstance(part, dict | bool) or not target.startswith("#/"):
        raise ToolInvalid(f"schema: $ref {shown} leads to something else than a schema")

"""Helpers that read parts of an arbitrary JSON Schema, for `reader.py`."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ..text.hidden import cut
from .types import ANY, NONE, ListOf, MapOf, Plain, Type, either, literals

MEMBERS = 24  # of an anyOf, an allOf, a tuple
_VALUES = 64  # of an enum
_TEXT = 200  # characters of a value that is listed
_SMALL = 2**53
_TYPED = (
    "type", "properties", "items", "prefixItems", "$ref", "anyOf", "oneOf", "allOf", "enum", "const",
    "additionalProperties", "patternProperties",
)  # fmt: skip


def without(schema: Mapping[str, Any], word: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != word}


def both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the properties of both; for other keywords `one` wins."""
    whole = {**other, **one}
    mine, theirs = one.get("properties"), other.get("properties")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        whole["properties"] = {**theirs, **mine}
    mine, theirs = one.get("required"), other.get("required")
    if isinstance(mine, list) and isinstance(theirs, list):
        whole["required"] = [*mine, *theirs]
    return whole


def typed_members(members: object) -> list[Mapping[str, Any]]:
    """Return the members of an anyOf that restrict the type of a value."""
    if not isinstance(members, list) or len(members) > MEMBERS:
        return []
    return [
        each for each in members
        if isinstance(each, Mapping) and any(word in each for word in _TYPED)
    ]  # fmt: skip


def implied(schema: Mapping[str, Any]) -> str:
    """Return the type of a schema that may not say it."""
    if isinstance(kind := schema.get("type"), str):
        return kind
    if any(word in schema for word in ("properties", "additionalProperties", "patternProperties")):
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else ""


def is_record(schema: Mapping[str, Any]) -> bool:
    other = ("anyOf", "oneOf", "enum", "const", "$ref")
    has_fields = isinstance(schema.get("properties"), Mapping) and bool(schema["properties"])
    return has_fields and implied(schema) == "object" and not any(word in schema for word in other)


def listed(values: list[Any]) -> Type:
    """Return one of `values`; their types alone where they are many, long, or no plain values."""
    if 0 < len(values) <= _VALUES and all(map(_is_short, values)):
        return literals(values)
    return either([_type_of(value) for value in values[: _VALUES * 4]])


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _TEXT
    return value is None or (isinstance(value, int) and abs(value) <= _SMALL)


def _type_of(value: object) -> Type:
    kinds: tuple[tuple[type, Type], ...] = (
        (bool, Plain("bool")), (int, Plain("int")), (float, Plain("float")), (str, Plain("str")),
        (list, ListOf(ANY)), (dict, MapOf(ANY)),
    )  # fmt: skip
    return NONE if value is None else next((t for k, t in kinds if isinstance(value, k)), ANY)


def default_in(schema: Mapping[str, Any]) -> str:
    if "default" not in schema or schema["default"] is None:
        return ""
    try:
        return cut(json.dumps(schema["default"]), 60)
    except (TypeError, ValueError, RecursionError):
        return ""


def part_of(root: object, reference: str) -> object:
    """Return what a reference leads to in `root`; None if that is nothing, or elsewhere."""
    if not reference.startswith("#"):
        return None
    part: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(step)
        elif isinstance(part, list) and step.isdecimal() and int(step[:6]) < len(part):
            part = part[int(step[:6])]
        else:
            return None
    return part

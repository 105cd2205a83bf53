"""Quick checks of the simple schemas that most arguments have: about a microsecond each.

A check that returns True proves that the value is JSON and valid in every part.  False proves nothing:
the whole validator, which takes ten times as long, decides then.
"""

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$comment", "deprecated"}
_SCALARS = {
    "string": (str,),
    "integer": (int,),  # not bool; the whole validator decides about 1.0
    "boolean": (bool,),
    "null": (type(None),),
}
_OBJECT = {"type", "properties", "required", "additionalProperties"}


def quick_check(schema: Any) -> Check | None:
    """Return a check that is True only for values that `schema` allows; None if it is not simple."""
    if not isinstance(schema, dict):
        return None
    words, kind = schema.keys() - _ANNOTATIONS, schema.get("type")
    if not isinstance(kind, str):
        return None
    if kind in _SCALARS and words == {"type"}:
        kinds = _SCALARS[kind]
        return lambda value: type(value) in kinds
    if kind == "number" and words == {"type"}:
        return _is_number
    if kind == "string" and words == {"type", "enum"}:
        return _one_of(schema["enum"])
    if kind == "array" and words <= {"type", "items"}:
        return _array(schema.get("items"))
    return _object(schema) if kind == "object" and words <= _OBJECT else None


def _kind(schema: dict[str, Any]) -> type | None:
    """Return the type of which `schema` allows every value; None if there is none."""
    if schema.keys() - _ANNOTATIONS != {"type"} or schema["type"] not in _SCALARS:
        return None
    return _SCALARS[schema["type"]][0]


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _one_of(texts: Any) -> Check | None:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    allowed = frozenset(texts)
    return lambda value: type(value) is str and value in allowed


def _array(items: Any) -> Check | None:
    check = quick_check(items)
    return check and (lambda value: type(value) is list and all(map(check, value)))


def _object(schema: dict[str, Any]) -> Check | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    more = schema.get("additionalProperties", True)
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or more not in (True, False)
    ):
        return None
    checks = {name: quick_check(each) for name, each in properties.items()}
    if not all(checks.values()):
        return None
    kinds = {name: _kind(each) for name, each in properties.items()}
    needed = frozenset(required)

    def check(value: Any) -> bool:
        if type(value) is not dict or not needed <= value.keys():
            return False
        for name, each in value.items():
            if type(each) is kinds.get(name):
                continue
            known = checks.get(name)
            if not (known and known(each)):  # a property without a schema may not even be JSON
                return False
        return True

    return check

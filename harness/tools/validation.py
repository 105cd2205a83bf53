"""Values against JSON Schema; the only module that knows `jsonschema`, which it imports when needed.

Schemas come from agents and servers, values from cells.  A schema is limited in size and depth, may
refer only to itself, and is compiled once.  Checking a value has a budget of steps, because a small
schema can ask for any number of them, and no pattern of a schema ever reaches `re` (patterns.py).
`format` is an annotation and not checked.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import msgspec

from ...policies.errors import ToolInvalid
from .patterns import Pattern, Unsupported, compile_pattern
from .quick import quick_check

MAX_SCHEMA_BYTES = 256 * 1024  # the largest of 900 tools of real servers has 44 KiB
_MAX_SCHEMA_DEPTH = 48
_MAX_VALUE_DEPTH = 64
_MAX_NODES = 1_000_000
_MAX_STEPS = 2_000_000  # half a microsecond each: about a second
_STEPS_PER_NODE = 80  # four keywords for each part of a value
_STEPS_PER_KEYWORD = 20
_MAX_COMPLAINTS = 10
_COMPLAINT_CHARACTERS = 300
_REMEMBERED = 1024
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_Keyword = Callable[[Any, Any, Any, Any], Any]


class _TooMuch(Exception):  # noqa: N818 - becomes a complaint
    """The check took more steps than it may."""


class _Budget(threading.local):
    left = 0

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooMuch


_budget = _Budget()


class Validator:
    """A compiled schema.  Safe from many threads.

    `unchecked` are patterns that would need backtracking: no value is refused because of them.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raise ToolInvalid for what is no schema, is too large, or refers to what it does not hold."""
        _check_shape(schema)
        self.unchecked = tuple(_check_words(schema))
        kind = _kind(schema)
        try:
            complaint = next(_meta(kind)(kind.META_SCHEMA).iter_errors(schema), None)
        except RecursionError:
            raise ToolInvalid("schema: nested too deeply") from None
        if complaint is not None:
            raise ToolInvalid(f"schema: {_said(complaint)}")
        self._validator = _extended(kind)(schema, registry=_no_registry())
        self._is_surely_right = quick_check(schema) or (lambda value: False)

    def complaints(self, value: Any) -> tuple[str, ...]:
        """Return what is wrong with `value`, the first ten; empty if nothing is."""
        if self._is_surely_right(value):
            return ()
        if not (nodes := _size(value, _MAX_VALUE_DEPTH)):
            return ("it is nested too deeply, too large, or not of JSON",)
        _budget.left = _MAX_STEPS + nodes * _STEPS_PER_NODE
        try:
            return tuple(map(_said, islice(self._validator.iter_errors(value), _MAX_COMPLAINTS)))
        except _TooMuch:
            return ("to check it against its schema takes too long",)
        except (RecursionError, OverflowError):
            return ("it cannot be checked against its schema, which refers to itself without end",)


def is_same(some: Any, other: Any) -> bool:
    """Tell whether two values are the same JSON: 1 and 1.0 are, 1 and true are not."""
    return _canonical(some) == _canonical(other)


class _Memory:
    """The last schemas, by a digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Validator] = OrderedDict()
        self._seen: dict[int, tuple[dict[str, Any], Validator]] = {}

    def get(self, schema: dict[str, Any]) -> Validator:
        """Return the validator of `schema`; the very same object is not looked at again."""
        known = self._seen.get(id(schema))
        if known and known[0] is schema:
            return known[1]
        validator = self._by_content(schema)
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[id(schema)] = (schema, validator)
        return validator

    def _by_content(self, schema: dict[str, Any]) -> Validator:
        _check_shape(schema)
        key = hashlib.sha256(msgspec.json.encode(schema)).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        validator = Validator(schema)
        with self._lock:
            self._known[key] = validator
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return validator


_memory = _Memory()


def compile_schema(schema: dict[str, Any]) -> Validator:
    """Return the validator of `schema`, made once; keep it rather than ask for every value.

    Raises ToolInvalid for what is no schema, is too large, or refers to what it does not hold.
    """
    return _memory.get(schema)


def _check_shape(schema: object) -> None:
    if not isinstance(schema, dict):
        raise ToolInvalid("schema: must be an object")
    if not _size(schema, _MAX_SCHEMA_DEPTH):
        raise ToolInvalid(f"schema: more than {_MAX_SCHEMA_DEPTH} deep, too large, or not of JSON")
    try:
        size = len(msgspec.json.encode(schema))
    except (ValueError, TypeError, OverflowError) as error:
        raise ToolInvalid(f"schema: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise ToolInvalid(f"schema: {size} bytes, more than {MAX_SCHEMA_BYTES}")


def _size(value: object, depth: int) -> int:
    """Return the number of parts of `value`; 0 if it is no JSON, deeper than `depth`, or too large."""
    level: list[object] = [value]
    nodes = 0
    while level:
        nodes += len(level)
        depth -= 1
        if depth < -1 or nodes > _MAX_NODES:
            return 0
        if not all(map(_is_json, level)):
            return 0
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
    return nodes


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    return value is None or isinstance(value, str | int | float | list)


def _parts(value: object) -> Iterator[dict[str, Any]]:
    """Yield every object within `value`."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _check_words(schema: dict[str, Any]) -> Iterator[str]:
    """Check what refers elsewhere, wherever it stands: a pointer may lead to any part of a schema.
    Yield the patterns that cannot be looked for."""
    objects = list(_parts(schema))
    anchors = {each.get(word) for each in objects for word in ("$anchor", "$dynamicAnchor")
               if isinstance(each.get(word), str)}  # fmt: skip
    has_ids = any(isinstance(each.get("$id"), str) for each in objects[1:])
    for each in objects:
        for word in _REFERENCES:
            if isinstance(target := each.get(word), str):
                _check_reference(schema, target, anchors, has_ids=has_ids)
        for pattern in _patterns_in(each):
            if _pattern(pattern) is None:
                yield pattern


def _patterns_in(each: dict[str, Any]) -> Iterator[str]:
    if isinstance(each.get("pattern"), str):
        yield each["pattern"]
    if isinstance(each.get("patternProperties"), dict):
        yield from each["patternProperties"]
        if "unevaluatedProperties" in each:  # jsonschema hands the patterns to `re` there
            raise ToolInvalid("schema: unevaluatedProperties beside patternProperties")


def _check_reference(
    schema: dict[str, Any], target: str, anchors: set[Any], *, has_ids: bool
) -> None:
    shown = ascii(target)[:_COMPLAINT_CHARACTERS]
    if not target.startswith("#"):
        raise ToolInvalid(f"schema: $ref {shown} leads outside: only `#...` is followed")
    if has_ids or target == "#" or target[1:] in anchors:
        return  # below another $id a pointer begins there: what it misses is found when it is used
    part: Any = schema
    for step in unquote(target[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and step in part:
            part = part[step]
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            raise ToolInvalid(f"schema: $ref {shown} leads to nothing in it")
    if not isinstance(part, dict | bool) or not target.startswith("#/"):
        raise ToolInvalid(f"schema: $ref {shown} leads to no schema")


@cache
def _no_registry() -> Any:
    from referencing import Registry

    return Registry()  # holds nothing and fetches nothing


def _kind(schema: dict[str, Any]) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)


@cache
def _meta(kind: Any) -> Any:
    """Return the class that checks schemas: without formats, which would compile patterns."""
    from jsonschema import FormatChecker

    def of(meta_schema: Any) -> Any:
        return kind(meta_schema, format_checker=FormatChecker(formats=()))

    return of


@cache
def _extended(kind: Any) -> Any:
    """Return `kind` with every keyword counted, and those that could take too long replaced."""
    from jsonschema import validators

    extend: Any = validators.extend
    ours = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional_properties,
        "uniqueItems": _check_unique_items,
    }
    return extend(kind, {name: _counted(each) for name, each in (kind.VALIDATORS | ours).items()})


def _counted(keyword: _Keyword) -> _Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _budget.spend(_STEPS_PER_KEYWORD)
        return keyword(validator, value, instance, schema)

    return counted


@cache
def _error() -> Any:
    from jsonschema import ValidationError

    return ValidationError


def _check_pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield _error()(f"{instance[:_COMPLAINT_CHARACTERS]!r} does not match {pattern!r}")


def _check_pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _: Any
) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, schema in patterns.items():
            for name, value in instance.items():
                if _pattern(pattern) and _matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _check_additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    more = [name for name in instance if name not in known
            and not any(_matches(pattern, name) for pattern in patterns)]  # fmt: skip
    if isinstance(allowed, dict):
        for name in more:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and more:
        names = ", ".join(map(repr, more[:_MAX_COMPLAINTS]))
        yield _error()(f"it has no property {names}")


def _check_unique_items(_: Any, unique: Any, instance: Any, __: Any) -> Iterator[Any]:
    """jsonschema compares every pair: for 100,000 objects that is minutes."""
    if unique and isinstance(instance, list):
        seen: set[bytes] = set()
        for each in instance:
            key = _canonical(each)
            if key in seen:
                yield _error()("its items are not unique")
                return
            seen.add(key)


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(_plain(value), order="deterministic")


def _plain(value: Any) -> Any:
    """Return `value` with 1.0 as 1: JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _matches(pattern: str, text: str) -> bool:
    compiled = _pattern(pattern)
    return compiled is None or compiled.found_in(text, _budget.spend)


def _pattern(text: str) -> Pattern | None:
    """Return the pattern, made once; None for one that cannot be looked for."""
    if text not in _patterns:
        if len(_patterns) >= _REMEMBERED:
            _patterns.clear()
        try:
            _patterns[text] = compile_pattern(text)
        except Unsupported:
            _patterns[text] = None
    return _patterns[text]


_patterns: dict[str, Pattern | None] = {}


def _said(error: Any) -> str:
    """Return one line: where, then what."""
    what = str(error.message)
    if len(what) > _COMPLAINT_CHARACTERS:
        what = what[:_COMPLAINT_CHARACTERS] + "..."
    return f"{ascii(error.json_path)[1:-1]}: {what}"

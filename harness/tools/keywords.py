"""Keywords of JSON Schema that could take too long as others check them, and what a check may cost.

A keyword yields a complaint as text, or whatever the validator's `descend` yields.
"""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .patterns import Pattern, Unsupported, compile_pattern

_STEPS = 2_000_000  # half a microsecond each: about a second
_STEPS_PER_NODE = 80  # four keywords for each part of a value
_STEPS_PER_KEYWORD = 20
_SHOWN = 300
_SHOWN_NAMES = 10
_REMEMBERED = 1024
Keyword = Callable[[Any, Any, Any, Any], Any]


class TooMuch(Exception):  # noqa: N818 - becomes a complaint
    """The check took more steps than it may."""


class _Budget(threading.local):
    left = 0

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuch


_budget = _Budget()


def allow(nodes: int) -> None:
    """Begin the check of a value of so many parts in this thread."""
    _budget.left = _STEPS + nodes * _STEPS_PER_NODE


def counted(keyword: Keyword, complaint: Callable[[str], Any]) -> Keyword:
    """Return `keyword`, which then costs steps and raises TooMuch, with complaints made of text."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _budget.spend(_STEPS_PER_KEYWORD)
        for each in keyword(validator, value, instance, schema) or ():
            yield complaint(each) if isinstance(each, str) else each

    return check


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[str]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield f"{instance[:_SHOWN]!r} does not match {pattern!r}"


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _: Any
) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, schema in patterns.items():
            for name, value in instance.items():
                if pattern_of(pattern) and _matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
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
        yield f"it has no property {', '.join(map(repr, more[:_SHOWN_NAMES]))}"


def _unique_items(_: Any, unique: Any, instance: Any, __: Any) -> Iterator[str]:
    """jsonschema compares every pair: for 100,000 objects that is hours."""
    if unique and isinstance(instance, list):
        seen: set[bytes] = set()
        for each in instance:
            key = canonical(each)
            if key in seen:
                yield "its items are not unique"
                return
            seen.add(key)


OURS: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


def canonical(value: Any) -> bytes:
    """Return the same bytes for the same JSON: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _matches(pattern: str, text: str) -> bool:
    compiled = pattern_of(pattern)
    return compiled is None or compiled.found_in(text, _budget.spend)


def pattern_of(text: str) -> Pattern | None:
    """Return the pattern, made once; None for one that cannot be looked for."""
    try:
        return _patterns[text]
    except KeyError:
        found = _compiled(text)
    if len(_patterns) >= _REMEMBERED:
        _patterns.clear()
    _patterns[text] = found
    return found


def _compiled(text: str) -> Pattern | None:
    try:
        return compile_pattern(text)
    except Unsupported:
        return None


_patterns: dict[str, Pattern | None] = {}

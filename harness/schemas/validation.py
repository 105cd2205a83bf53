"""Validation of values against JSON Schema, bounded in size, time and memory.

Schemas come from agents and servers, values from cells.  A schema is limited in size and depth, and may
refer only to itself (bounds.py).  A schema with a quick check, and the values that pass it, need no
more; the rest is left to a confined process (checker.py), whose answer is bounded and is awaited until
the caller has given up.  `format` is an annotation and not checked.

Quick checks of the simple schemas that most arguments have: about a microsecond each.

A check that returns True proves that the value is JSON and valid in every part.  False proves nothing:
the checker decides then.  A schema that has a quick check is valid itself, in every dialect.
"""

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...policies.errors import BudgetExceeded, ToolInvalid
from ...runner.concurrency import CANCEL, Budget
from .bounds import check_shape, check_words, size_of

if TYPE_CHECKING:
    from .checker import CheckAnswer

COMPILE_STEPS = 8_000_000
_SECONDS = 10.0  # time to compile a schema or check a value, with the wait for a free checker
_REMEMBERED = 1024
_REMEMBERED_BYTES = 64 * 1024 * 1024  # estimated memory of all cached validators
_OBJECTS_PER_TEXT = 10  # memory of a decoded schema divided by the size of its JSON, about
_MOST_VALUE_BYTES = 32 * 1024 * 1024


class Validator:
    """A compiled schema.  Safe from many threads.

    `unchecked` lists the patterns that cannot be compiled: they are not checked, and refuse no value.
    `size_bytes` estimates the memory of the validator; `is_certainly_valid` is its quick check.
    """

    def __init__(self, schema: dict[str, Any], budget: Budget | None = None) -> None:
        """Compile `schema`; raises ToolInvalid if it is not a valid schema, is too large, has a
        reference that leads nowhere or outside, or needs more than the budget."""
        self._schema = check_shape(schema)
        check_words(schema)
        self._digest = hashlib.sha256(self._schema).digest()
        self.size_bytes = len(self._schema) * _OBJECTS_PER_TEXT
        self.unchecked: tuple[str, ...] = ()
        check = quick_check(schema)
        self.is_certainly_valid = check or (lambda value: False)
        if not check:
            self._compile(budget or _budget("compiling the schema", COMPILE_STEPS))

    def _compile(self, budget: Budget) -> None:
        try:
            answer = self._ask(b"", budget)
        except BudgetExceeded as exceeded:
            raise ToolInvalid(f"schema: {exceeded.what}") from None
        if answer.invalid:
            raise ToolInvalid(f"schema: {answer.invalid}")
        self.unchecked = answer.unchecked

    def complaints(self, value: Any) -> tuple[str, ...]:
        """Return the first ten errors of `value`; empty if it is valid.

        A value that needs more than the checker may use gets a complaint too: it is refused.
        """
        if self.is_certainly_valid(value):
            return ()
        if not size_of(value):
            return ("the value is nested too deeply, too large, or not JSON",)
        # A lone surrogate becomes one character of the same length.
        given = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        if len(given) > _MOST_VALUE_BYTES:
            return (f"the value is larger than {_MOST_VALUE_BYTES >> 20} MiB",)
        budget = _budget("checking the value against its schema", float("inf"))
        try:
            answer = self._ask(given, budget)
        except BudgetExceeded as exceeded:
            return (exceeded.what,)
        return (f"schema: {answer.invalid}",) if answer.invalid else answer.complaints

    def _ask(self, value: bytes, budget: Budget) -> "CheckAnswer":
        from . import checker_pool  # most schemas have a quick check
        from .checker import CheckRequest

        schema = b"" if value else self._schema
        request = CheckRequest(self._digest, schema, value)
        return checker_pool.checkers.ask(request, self._schema, budget)


def is_same(some: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON: 1 equals 1.0, and does not equal true."""
    return _canonical(some) == _canonical(other)


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _budget(what: str, steps: float) -> Budget:
    return Budget(what, steps, seconds=_SECONDS, cancel=CANCEL.get())


class _ValidatorCache:
    """An LRU cache of validators by the digest of their schema, bounded in number and in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Validator] = OrderedDict()
        self._size_bytes = 0
        self.seen: dict[int, tuple[dict[str, Any], Validator]] = {}
        self._seen_bytes = 0

    def get(self, schema: dict[str, Any], budget: Budget | None) -> Validator:
        """Return the validator of `schema`, and remember the object: it is not hashed again."""
        validator = self._by_content(schema, budget)
        with self._lock:
            self._seen_bytes += validator.size_bytes
            if len(self.seen) >= _REMEMBERED or self._seen_bytes > _REMEMBERED_BYTES:
                self.seen.clear()
                self._seen_bytes = validator.size_bytes
            self.seen[id(schema)] = (schema, validator)
        return validator

    def _by_content(self, schema: dict[str, Any], budget: Budget | None) -> Validator:
        key = hashlib.sha256(check_shape(schema)).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        validator = Validator(schema, budget)  # outside the lock: compiling may take seconds
        with self._lock:
            if key not in self._known:
                self._known[key] = validator
                self._size_bytes += validator.size_bytes
            while len(self._known) > _REMEMBERED or self._size_bytes > _REMEMBERED_BYTES:
                _, oldest = self._known.popitem(last=False)
                self._size_bytes -= oldest.size_bytes
        return validator


_validators = _ValidatorCache()


def compile_schema(schema: dict[str, Any], budget: Budget | None = None) -> Validator:
    """Return the cached validator of `schema`; keep it to check several values.

    Raises ToolInvalid if it is not a valid schema, is too large, has a reference that leads nowhere or
    outside, or needs more than `budget` to compile (default 10 s).
    """
    known = _validators.seen.get(id(schema))
    return known[1] if known and known[0] is schema else _validators.get(schema, budget)


Check = Callable[[Any], bool]
_ANNOTATIONS = {
    "title": str, "description": str, "default": object, "examples": list, "$schema": str,
    "$comment": str, "deprecated": bool,
}  # fmt: skip
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
    words, kind = schema.keys() - _ANNOTATIONS.keys(), schema.get("type")
    if not isinstance(kind, str) or not _are_annotations_valid(schema):
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


def _are_annotations_valid(schema: dict[str, Any]) -> bool:
    named = _ANNOTATIONS.keys() & schema.keys()
    return all(isinstance(schema[name], _ANNOTATIONS[name]) for name in named)


def _kind(schema: dict[str, Any]) -> type | None:
    """Return the type whose every value `schema` allows; None if there is no such type."""
    if schema.keys() - _ANNOTATIONS.keys() != {"type"} or schema["type"] not in _SCALARS:
        return None
    return _SCALARS[schema["type"]][0]


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _one_of(texts: Any) -> Check | None:
    if not texts or not _are_names(texts):
        return None
    allowed = frozenset(texts)
    return lambda value: type(value) is str and value in allowed


def _are_names(given: Any) -> bool:
    is_list = isinstance(given, list) and all(isinstance(each, str) for each in given)
    return is_list and len(set(given)) == len(given)


def _array(items: Any) -> Check | None:
    check = quick_check(items)
    return check and (lambda value: type(value) is list and all(map(check, value)))


def _object(schema: dict[str, Any]) -> Check | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    more = schema.get("additionalProperties", True)
    if (
        not isinstance(properties, dict)
        or not _are_names(required)
        or (more is not True and more is not False)
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

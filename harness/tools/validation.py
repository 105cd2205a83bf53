"""Values against JSON Schema; the only module that knows `jsonschema`, which it imports when needed.

Schemas come from agents and servers, values from cells.  A schema is limited in size and depth, may
refer only to itself, and is compiled once (bounds.py).  Checking a value has a budget of steps,
because a small schema can ask for any number of them, and no pattern of a schema ever reaches `re`
(keywords.py, patterns.py).  `format` is an annotation and not checked.
"""

import hashlib
import threading
from collections import OrderedDict
from functools import cache
from itertools import islice
from typing import Any

import msgspec

from ...policies.errors import ToolInvalid
from .bounds import check_shape, check_words, patterns_in, size_of
from .keywords import OURS, TooMuch, allow, canonical, counted, pattern_of
from .quick import quick_check

_MAX_COMPLAINTS = 10
_COMPLAINT_CHARACTERS = 300
_REMEMBERED = 1024


class Validator:
    """A compiled schema.  Safe from many threads.

    `unchecked` are patterns that would need backtracking: no value is refused because of them.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raise ToolInvalid for what is no schema, is too large, or refers to what it does not hold."""
        check_shape(schema)
        check_words(schema)
        self.unchecked = tuple(each for each in patterns_in(schema) if pattern_of(each) is None)
        kind = _kind(schema.get("$schema"))
        _check_against_metaschema(kind, schema)
        # A $schema would make jsonschema go on with its own keywords wherever `#` is referred to.
        plain = {name: value for name, value in schema.items() if name != "$schema"}
        self._validator = _extended(kind)(plain, registry=_no_registry())
        self._is_surely_right = quick_check(schema) or (lambda value: False)

    def complaints(self, value: Any) -> tuple[str, ...]:
        """Return what is wrong with `value`, the first ten; empty if nothing is."""
        if self._is_surely_right(value):
            return ()
        if not (nodes := size_of(value)):
            return ("it is nested too deeply, too large, or not of JSON",)
        allow(nodes)
        try:
            return tuple(map(_said, islice(self._validator.iter_errors(value), _MAX_COMPLAINTS)))
        except TooMuch:
            return ("to check it against its schema takes too long",)
        except Exception as error:  # noqa: BLE001 - of a part of a schema that is none itself
            return (f"it cannot be checked against its schema: {type(error).__name__}",)


def is_same(some: Any, other: Any) -> bool:
    """Tell whether two values are the same JSON."""
    return canonical(some) == canonical(other)


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
        check_shape(schema)
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


@cache
def _no_registry() -> Any:
    from referencing import Registry

    return Registry()  # holds nothing and fetches nothing


def _kind(dialect: object) -> Any:
    """Return jsonschema's class for a dialect: of old ones the last, for unknown ones the newest."""
    import jsonschema

    if isinstance(dialect, str) and "json-schema.org/draft-0" in dialect:
        return jsonschema.Draft7Validator  # those before it compare pairs in their own schema
    if isinstance(dialect, str) and "2019-09" in dialect:
        return jsonschema.Draft201909Validator
    return jsonschema.Draft202012Validator


def _check_against_metaschema(kind: Any, schema: dict[str, Any]) -> None:
    from jsonschema import FormatChecker

    no_formats = FormatChecker(formats=())  # they would compile patterns
    checker = kind(kind.META_SCHEMA, format_checker=no_formats)
    try:
        complaint = next(checker.iter_errors(schema), None)
    except RecursionError:
        raise ToolInvalid("schema: nested too deeply") from None
    if complaint is not None:
        raise ToolInvalid(f"schema: {_said(complaint)}")


@cache
def _extended(kind: Any) -> Any:
    """Return `kind` with every keyword counted, and ours in the place of those that take too long."""
    from jsonschema import ValidationError, validators

    extend: Any = validators.extend
    keywords = {**kind.VALIDATORS, **OURS}
    return extend(kind, {name: counted(each, ValidationError) for name, each in keywords.items()})


def _said(error: Any) -> str:
    """Return one line: where, then what."""
    what = str(error.message)
    if len(what) > _COMPLAINT_CHARACTERS:
        what = what[:_COMPLAINT_CHARACTERS] + "..."
    return f"{ascii(error.json_path)[1:-1]}: {what}"

"""Validation of values against JSON Schema, bounded in size, steps and time.

Schemas come from agents and servers, values from cells.  A schema is limited in size and depth, may
refer only to itself (bounds.py), and is compiled once.  Compiling a schema and checking a value have a
budget each, because a small schema can ask for any amount of work, and both end once the caller has
given up (evaluation.py, patterns.py).  `format` is an annotation and not checked.

Only this module imports `referencing`, and lazily.
"""

import hashlib
import threading
from collections import OrderedDict
from functools import cache
from typing import Any

import msgspec

from ...policies.errors import BudgetExceeded, ToolInvalid
from ...runner.budget import CANCEL, Budget
from .bounds import check_shape, check_words, patterns_in, size_of
from .evaluation import Dialect, Evaluation, SchemaCache, canonical
from .keywords import DRAFT_7, DRAFT_2019, DRAFT_2020
from .quick_checks import quick_check

COMPILE_STEPS = 8_000_000
COMPILE_SECONDS = 10.0
_CHECK_STEPS = 2_000_000
_STEPS_PER_NODE = 80  # for each part of a value: about four keywords
_CHECK_SECONDS = 10.0
_REMEMBERED = 1024
_REMEMBERED_BYTES = 64 * 1024 * 1024  # estimated memory of all cached validators
_BYTES_PER_STATE = 250  # of a pattern, measured
_OBJECTS_PER_TEXT = 10  # memory of a decoded schema divided by the size of its JSON, about


class Validator:
    """A compiled schema.  Safe from many threads.

    `unchecked` lists the patterns that need backtracking: they are not checked, and refuse no value.
    `size_bytes` estimates the memory of the validator; `is_certainly_valid` is its quick check.
    """

    def __init__(self, schema: dict[str, Any], budget: Budget | None = None) -> None:
        """Compile `schema`; raises ToolInvalid if it is not a valid schema, is too large, has a
        reference that leads nowhere or outside, or needs more than the budget."""
        size = check_shape(schema)
        check_words(schema)
        budget = budget or _budget("compiling the schema", COMPILE_STEPS, COMPILE_SECONDS)
        self._schema = schema
        self._cache = SchemaCache()
        try:
            self.unchecked = tuple(
                each for each in patterns_in(schema) if self._cache.pattern(each, budget) is None
            )
            self._dialect = _checked_dialect(schema, budget)
        except BudgetExceeded as exceeded:
            raise ToolInvalid(f"schema: {exceeded.what}") from None
        self._resolver = _resolver_of(self._dialect, schema)
        self.is_certainly_valid = quick_check(schema) or (lambda value: False)
        self.size_bytes = size * _OBJECTS_PER_TEXT + self._cache.states * _BYTES_PER_STATE

    def complaints(self, value: Any, budget: Budget | None = None) -> tuple[str, ...]:
        """Return the first ten errors of `value`; empty if it is valid.

        A value that needs more than the budget gets a complaint too: it is refused.
        """
        if self.is_certainly_valid(value):
            return ()
        if not (nodes := size_of(value)):
            return ("the value is nested too deeply, too large, or not JSON",)
        steps = _CHECK_STEPS + nodes * _STEPS_PER_NODE
        budget = budget or _budget("checking the value against its schema", steps, _CHECK_SECONDS)
        try:
            evaluation = Evaluation(self._dialect, self._cache, budget)
            return evaluation.run(self._schema, value, self._resolver)
        except BudgetExceeded as exceeded:
            return (exceeded.what,)
        except Exception as error:  # noqa: BLE001 - a reference may lead to a part that is no schema
            return (f"the value cannot be checked against its schema: {type(error).__name__}",)


def is_same(some: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON."""
    return canonical(some) == canonical(other)


def _budget(what: str, steps: int, seconds: float) -> Budget:
    return Budget(what, steps, seconds=seconds, cancel=CANCEL.get())


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
        check_shape(schema)
        key = hashlib.sha256(msgspec.json.encode(schema)).digest()
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
    outside, or needs more than `budget` to compile (default 8,000,000 steps and 10 s).
    """
    known = _validators.seen.get(id(schema))
    return known[1] if known and known[0] is schema else _validators.get(schema, budget)


# dialects and their metaschemas

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
_UNNAMED = ""


def _checked_dialect(schema: dict[str, Any], budget: Budget) -> Dialect:
    """Return the dialect of a schema; raises ToolInvalid if the schema is invalid in it.

    A schema that names no dialect and is invalid in the newest one may be of draft 7: old generators
    leave the name out.  It is checked with the keywords of both, so that none is lost.
    """
    named = _uri_of(schema.get("$schema"))
    complaint = _complaint_about(named, schema, budget)
    if not complaint:
        return _dialect(named)
    if "$schema" not in schema and not _complaint_about(_DRAFT_7, schema, budget):
        return _dialect(_UNNAMED)
    raise ToolInvalid(f"schema: {complaint}")


def _uri_of(dialect: object) -> str:
    """Return the URI of a supported dialect: draft 7 for older ones, the newest for unknown ones."""
    if isinstance(dialect, str) and "json-schema.org/draft-0" in dialect:
        return _DRAFT_7
    if isinstance(dialect, str) and "2019-09" in dialect:
        return _DRAFT_2019
    return _DRAFT_2020


@cache
def _dialect(uri: str) -> Dialect:
    from referencing.jsonschema import DRAFT7, DRAFT201909, DRAFT202012, lookup_recursive_ref

    if uri == _DRAFT_7:
        create: Any = DRAFT7.create_resource
        return Dialect(DRAFT_7, create, lookup_recursive_ref, True, False, False)
    if uri == _DRAFT_2019:
        create = DRAFT201909.create_resource
        return Dialect(DRAFT_2019, create, lookup_recursive_ref, False, True, False)
    create = DRAFT202012.create_resource
    if uri == _UNNAMED:
        create = DRAFT201909.create_resource  # supports both $anchor and lists of items
        return Dialect(DRAFT_7 | DRAFT_2020, create, lookup_recursive_ref, False, True, True)
    return Dialect(DRAFT_2020, create, lookup_recursive_ref, False, True, True)


@cache
def _meta(uri: str) -> tuple[Any, Any, SchemaCache]:
    """Return the metaschema of a dialect, its resolver, and its cache."""
    from jsonschema_specifications import REGISTRY

    registry: Any = REGISTRY
    return registry.contents(uri), registry.resolver(uri), SchemaCache()


def _complaint_about(uri: str, schema: dict[str, Any], budget: Budget) -> str:
    meta, resolver, cache = _meta(uri)
    evaluation = Evaluation(_dialect(uri), cache, budget, lenient=True, most=1)
    try:
        return "".join(evaluation.run(meta, schema, resolver))
    except RecursionError:
        raise ToolInvalid("schema: nested too deeply") from None


def _resolver_of(dialect: Dialect, schema: dict[str, Any]) -> Any:
    from referencing import Registry

    registry: Any = Registry()  # contains nothing else and fetches nothing
    resource = dialect.resource_of(schema)
    try:
        # Crawl now: otherwise each reference to an anchor crawls the schema again.
        registry = registry.with_resource(resource.id() or "", resource).crawl()
        return registry.resolver(resource.id() or "")
    except Exception as error:  # noqa: BLE001 - `referencing` raises many kinds for an odd $id
        raise ToolInvalid(f"schema: invalid $id or $anchor: {type(error).__name__}") from None

"""JSON Schema, evaluated: one function for each keyword, each of which pays for its work beforehand.

Validators of others cannot be bounded from outside: jsonschema compares every member of an `enum` with
every value, and writes the whole value into each of its complaints; jsonschema-rs took 7.6 GiB for
2,000 branches of an `anyOf` and a text of 1 MiB (measured with 0.60), and cannot be interrupted.  The
meanings are theirs (json-schema.org, drafts 4 to 7, 2019-09 and 2020-12); `format` is an annotation.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple

from ...policies.errors import BudgetExceeded
from ...runner.budget import Budget
from .patterns import Pattern, Unsupported, compile_pattern

MOST_COMPLAINTS = 10
_STEPS_PER_SCHEMA = 5
_STEPS_PER_KEYWORD = 5
_STEPS_PER_REFERENCE = 40
_STEPS_PER_KEY = 5  # for each part of a value that is compared
# Of schemas that lead to each other at one moment, each up to four frames of the interpreter: where its
# stack ends inside rpds, which `referencing` uses, that is a PanicException, and no Exception.
_MOST_DEPTH = 160
_MOST_STATES = 50_000  # of the patterns of one schema; each takes some 250 bytes
_CHARACTERS_PER_STEP = 32  # of texts that are compared, copied or encoded
_COMPLAINT_CHARACTERS = 300
_SHOWN_CHARACTERS = 200  # of a text within a complaint
_SHOWN_PARTS = 8
_SHOWN_DEPTH = 3
Where = tuple[Any, ...]  # (where the parent is, name or index); () is the top
Keyword = Callable[["Evaluation", Any, Any, "At"], None]


class _Enough(Exception):  # noqa: N818 - ends the evaluation
    """There are as many complaints as are told; where only validity is asked for, one."""


class At(NamedTuple):
    """Where a keyword stands, which part of the value it is about, and how references are resolved."""

    schema: dict[str, Any]
    where: Where
    resolver: Any


class Dialect(NamedTuple):
    """The keywords of one version of JSON Schema.

    `resource_of` makes of a part of a schema what resolvers take, `recursive` follows `$recursiveRef`.
    """

    words: dict[str, Keyword]
    resource_of: Callable[[Any], Any]
    recursive: Callable[[Any], Any]
    ref_stands_alone: bool  # what stands beside a $ref is ignored
    counts_contains: bool  # there are minContains and maxContains
    contains_evaluates: bool


class SchemaCache:
    """What is worked out once for a schema: the keywords of each part, and its `enum`s as sets."""

    def __init__(self) -> None:
        self.words: dict[int, list[tuple[Keyword, Any]]] = {}
        self.members: dict[int, frozenset[bytes]] = {}
        self.states = 0  # of all patterns together
        self._patterns: dict[str, Pattern | None] = {}

    def pattern(self, text: str, budget: Budget) -> Pattern | None:
        """Return the pattern; None for one that cannot be matched in linear time, or is too large."""
        if text not in self._patterns:
            try:
                compiled = compile_pattern(text, budget.spend)
                self.states += len(compiled.states)
            except Unsupported:
                compiled = None
            if self.states > _MOST_STATES:
                raise BudgetExceeded(f"patterns with more than {_MOST_STATES} states together")
            self._patterns[text] = compiled
        return self._patterns[text]


class Evaluation:
    """One value against one schema; `complaints` says what is wrong, the first `most`.

    Every method raises BudgetExceeded once the budget is used up.  `lenient` accepts `true` for
    `exclusiveMinimum` and `exclusiveMaximum`, which draft 4 had, where it meets them in the value.
    """

    def __init__(
        self, dialect: Dialect, memory: SchemaCache, budget: Budget, *,
        lenient: bool = False, most: int = MOST_COMPLAINTS,
    ) -> None:  # fmt: skip
        self.dialect = dialect
        self.memory = memory
        self.budget = budget
        self.spend = budget.spend
        self.complaints: list[str] = []
        self._most = most
        self._lenient = lenient
        self._quiet = False
        self._depth = 0

    def run(self, schema: Any, value: Any, resolver: Any) -> tuple[str, ...]:
        """Return what is wrong with `value`; empty if nothing is."""
        with contextlib.suppress(_Enough):
            self.apply(schema, value, (), resolver)
        return tuple(self.complaints)

    def apply(self, schema: Any, value: Any, where: Where, resolver: Any) -> None:
        """Note what is wrong with a part of the value according to a part of the schema."""
        self.spend(_STEPS_PER_SCHEMA)
        if schema is True:
            return
        if schema is False:
            self.complain(where, f"{self.show(value)} is not allowed here")
            return
        if self._lenient and isinstance(value, bool) and where and where[1] in _EXCLUSIVE:
            return
        at = At(schema, where, self.resolver_in(schema, resolver))
        self.go_deeper()
        for keyword, given in self._words(schema):
            self.spend(_STEPS_PER_KEYWORD)
            keyword(self, given, value, at)
        self.come_back()

    def go_deeper(self) -> None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise BudgetExceeded(f"more than {_MOST_DEPTH} schemas lead to each other")

    def come_back(self) -> None:
        self._depth -= 1

    def resolver_in(self, schema: dict[str, Any], resolver: Any) -> Any:
        """Return what resolves references in a part of the schema: another one below an `$id`."""
        if not isinstance(id := schema.get("$id"), str):
            return resolver
        self.spend(_STEPS_PER_REFERENCE + len(id))
        return resolver.in_subresource(self.dialect.resource_of(schema))

    def is_valid(self, schema: Any, value: Any, at: At) -> bool:
        """Tell whether nothing is wrong, without noting what."""
        before, depth, self._quiet = self._quiet, self._depth, True
        try:
            self.apply(schema, value, at.where, at.resolver)
        except _Enough:
            return False
        finally:
            self._quiet, self._depth = before, depth
        return True

    def complain(self, where: Where, text: str) -> None:
        if self._quiet:
            raise _Enough
        if len(text) > _COMPLAINT_CHARACTERS:
            text = f"{text[:_COMPLAINT_CHARACTERS]}..."
        self.complaints.append(f"{_path(where)}: {text}")
        if len(self.complaints) == self._most:
            raise _Enough

    def show(self, value: Any) -> str:
        """Return a value for a complaint, the head of it if it is long; nothing if none is told."""
        return "" if self._quiet else _shown(value)

    def matches(self, pattern: str, text: str) -> bool:
        """Tell whether a pattern is in a text, or cannot be looked for."""
        compiled = self.memory.pattern(pattern, self.budget)
        return compiled is None or compiled.found_in(text, self.spend)

    def key(self, value: Any) -> bytes:
        """Return the same bytes for the same JSON."""
        self._pay_for(value)
        return canonical(value)

    def _pay_for(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            self.spend(_STEPS_PER_KEY)
            if isinstance(each, str):
                self.spend(len(each) // _CHARACTERS_PER_STEP)
            elif isinstance(each, list):
                waiting += each
            elif isinstance(each, dict):
                self.spend(sum(map(len, each)) // _CHARACTERS_PER_STEP)
                waiting += each.values()

    def members(self, values: list[Any]) -> frozenset[bytes]:
        known = self.memory.members.get(id(values))
        if known is None:
            known = frozenset(map(self.key, values))
            self.memory.members[id(values)] = known
        return known

    def _words(self, schema: dict[str, Any]) -> list[tuple[Keyword, Any]]:
        known = self.memory.words.get(id(schema))
        if known is None:
            self.spend(len(schema))
            words = self.dialect.words
            if self.dialect.ref_stands_alone and "$ref" in schema:
                known = [(words["$ref"], schema["$ref"])]
            else:
                known = [(words[name], given) for name, given in schema.items() if name in words]
            self.memory.words[id(schema)] = known
        return known


def _path(where: Where) -> str:
    parts: list[str] = []
    while where:
        where, step = where
        parts.append(f"[{step}]" if isinstance(step, int) else _name(step))
    return ascii("$" + "".join(reversed(parts)))[1:-1]


def _name(step: str) -> str:
    return f".{step}" if step.isidentifier() and len(step) < 100 else f"[{step[:100]!r}]"


def _shown(value: Any, depth: int = _SHOWN_DEPTH) -> str:
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS])
    if isinstance(value, list):
        parts = [_shown(each, depth - 1) for each in value[:_SHOWN_PARTS]] if depth else []
        return f"[{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}]"
    if isinstance(value, dict):
        some = islice(value.items(), _SHOWN_PARTS if depth else 0)
        parts = [f"{_shown(name)}: {_shown(each, depth - 1)}" for name, each in some]
        return f"{{{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}}}"
    return repr(value)


# references


def _ref(e: Evaluation, reference: str, value: Any, at: At) -> None:
    resolved = _resolved(e, reference, at)
    e.apply(resolved.contents, value, at.where, resolved.resolver)


def _recursive_ref(e: Evaluation, _: Any, value: Any, at: At) -> None:
    e.spend(_STEPS_PER_REFERENCE)
    resolved = e.dialect.recursive(at.resolver)
    e.apply(resolved.contents, value, at.where, resolved.resolver)


def _resolved(e: Evaluation, reference: str, at: At) -> Any:
    # A pointer is walked step by step, each time from its beginning.
    e.spend(_STEPS_PER_REFERENCE + len(reference) + reference.count("/") ** 2)
    return at.resolver.lookup(reference)


# any value


def is_type(value: Any, name: str) -> bool:
    """Tell whether a value is of a type of JSON Schema; 1.0 is an integer, true is no number."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _TYPES.get(name, ()))


_TYPES: dict[str, Any] = {
    "string": str, "number": (int, float), "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def _type(e: Evaluation, given: Any, value: Any, at: At) -> None:
    names = [given] if isinstance(given, str) else given
    e.spend(len(names))
    if not any(is_type(value, name) for name in names):
        wanted = ", ".join(map(repr, names[:_SHOWN_PARTS]))
        e.complain(at.where, f"{e.show(value)} is not of type {wanted}")


def _enum(e: Evaluation, values: Any, value: Any, at: At) -> None:
    if e.key(value) not in e.members(values):
        e.complain(at.where, f"{e.show(value)} is not one of {e.show(values)}")


def _const(e: Evaluation, const: Any, value: Any, at: At) -> None:
    if e.key(value) != e.key(const):
        e.complain(at.where, f"{e.show(const)} was expected")


def _all_of(e: Evaluation, schemas: list[Any], value: Any, at: At) -> None:
    for schema in schemas:
        e.apply(schema, value, at.where, at.resolver)


def _any_of(e: Evaluation, schemas: list[Any], value: Any, at: At) -> None:
    if not any(e.is_valid(schema, value, at) for schema in schemas):
        e.complain(at.where, f"{e.show(value)} is not valid under any of the given schemas")


def _one_of(e: Evaluation, schemas: list[Any], value: Any, at: At) -> None:
    valid = sum(1 for _ in islice(filter(lambda each: e.is_valid(each, value, at), schemas), 2))
    if not valid:
        e.complain(at.where, f"{e.show(value)} is not valid under any of the given schemas")
    elif valid > 1:
        e.complain(at.where, f"{e.show(value)} is valid under more than one of the given schemas")


def _not(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if e.is_valid(schema, value, at):
        e.complain(at.where, f"{e.show(value)} should not be valid under {e.show(schema)}")


def _if(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    branch = "then" if e.is_valid(schema, value, at) else "else"
    if branch in at.schema:
        e.apply(at.schema[branch], value, at.where, at.resolver)


# numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _minimum(e: Evaluation, least: Any, value: Any, at: At) -> None:
    if not _is_number(value):
        return
    if value < least:
        e.complain(at.where, f"{value!r} is less than the minimum of {least!r}")
    elif value == least and at.schema.get("exclusiveMinimum") is True:  # draft 4
        e.complain(at.where, f"{value!r} is less than or equal to the minimum of {least!r}")


def _maximum(e: Evaluation, most: Any, value: Any, at: At) -> None:
    if not _is_number(value):
        return
    if value > most:
        e.complain(at.where, f"{value!r} is greater than the maximum of {most!r}")
    elif value == most and at.schema.get("exclusiveMaximum") is True:  # draft 4
        e.complain(at.where, f"{value!r} is greater than or equal to the maximum of {most!r}")


def _exclusive_minimum(e: Evaluation, least: Any, value: Any, at: At) -> None:
    if _is_number(value) and _is_number(least) and value <= least:
        e.complain(at.where, f"{value!r} is less than or equal to the minimum of {least!r}")


def _exclusive_maximum(e: Evaluation, most: Any, value: Any, at: At) -> None:
    if _is_number(value) and _is_number(most) and value >= most:
        e.complain(at.where, f"{value!r} is greater than or equal to the maximum of {most!r}")


def _multiple_of(e: Evaluation, divisor: Any, value: Any, at: At) -> None:
    if _is_number(value) and not _is_multiple(value, divisor):
        e.complain(at.where, f"{value!r} is not a multiple of {divisor!r}")


def _is_multiple(value: Any, divisor: Any) -> bool:
    if not isinstance(divisor, float):
        return not value % divisor
    try:
        quotient = value / divisor
        return bool(int(quotient) == quotient)
    except OverflowError:
        return (Fraction(value) / Fraction(divisor)).denominator == 1


# texts


def _min_length(e: Evaluation, least: Any, value: Any, at: At) -> None:
    if isinstance(value, str) and len(value) < least:
        e.complain(at.where, f"{e.show(value)} is too short")


def _max_length(e: Evaluation, most: Any, value: Any, at: At) -> None:
    if isinstance(value, str) and len(value) > most:
        e.complain(at.where, f"{e.show(value)} is too long")


def _pattern(e: Evaluation, pattern: str, value: Any, at: At) -> None:
    if isinstance(value, str) and not e.matches(pattern, value):
        e.complain(at.where, f"{e.show(value)} does not match {pattern[:_SHOWN_CHARACTERS]!r}")


# arrays


def _items(e: Evaluation, given: Any, value: Any, at: At) -> None:
    """Apply a schema to what is beyond `prefixItems`; before 2020-12 a list of schemas, one by one."""
    if not isinstance(value, list):
        return
    if isinstance(given, list):
        _prefix_items(e, given, value, at)
        return
    _to_rest(e, given, value, at, len(at.schema.get("prefixItems", ())))


def _prefix_items(e: Evaluation, schemas: list[Any], value: Any, at: At) -> None:
    if isinstance(value, list):
        for index, (schema, item) in enumerate(zip(schemas, value, strict=False)):
            e.apply(schema, item, (at.where, index), at.resolver)


def _additional_items(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if isinstance(value, list) and isinstance(items := at.schema.get("items"), list):
        _to_rest(e, schema, value, at, len(items))


def _to_rest(e: Evaluation, schema: Any, value: list[Any], at: At, first: int) -> None:
    if schema is True:
        return
    if schema is False and len(value) > first:
        e.complain(at.where, f"it has {len(value)} items, more than {first}")
        return
    for index in range(first, len(value)):
        e.apply(schema, value[index], (at.where, index), at.resolver)


def _contains(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if not isinstance(value, list):
        return
    counts = e.dialect.counts_contains
    least = at.schema.get("minContains", 1) if counts else 1
    most = at.schema.get("maxContains", len(value)) if counts else len(value)
    found = sum(1 for each in value if e.is_valid(schema, each, at))
    if found < least:
        e.complain(at.where, f"{found} of its items match the schema of contains, not {least}")
    elif found > most:
        e.complain(at.where, f"{found} of its items match the schema of contains, not {most}")


def _min_items(e: Evaluation, least: Any, value: Any, at: At) -> None:
    if isinstance(value, list) and len(value) < least:
        e.complain(at.where, f"{e.show(value)} is too short")


def _max_items(e: Evaluation, most: Any, value: Any, at: At) -> None:
    if isinstance(value, list) and len(value) > most:
        e.complain(at.where, f"{e.show(value)} is too long")


def _unique_items(e: Evaluation, unique: Any, value: Any, at: At) -> None:
    if not unique or not isinstance(value, list):
        return
    seen: set[bytes] = set()
    for each in value:
        if (key := e.key(each)) in seen:
            e.complain(at.where, "its items are not unique")
            return
        seen.add(key)


# objects


def _properties(e: Evaluation, properties: dict[str, Any], value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    fewer = properties if len(properties) <= len(value) else value
    e.spend(len(fewer))
    for name in [name for name in fewer if name in properties and name in value]:
        e.apply(properties[name], value[name], (at.where, name), at.resolver)


def _pattern_properties(e: Evaluation, patterns: dict[str, Any], value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    for pattern, schema in patterns.items():
        if e.memory.pattern(pattern, e.budget) is None:
            continue
        for name, each in value.items():
            if e.matches(pattern, name):
                e.apply(schema, each, (at.where, name), at.resolver)


def _additional_properties(e: Evaluation, allowed: Any, value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    more = list(_unknown(e, value, at.schema))
    if allowed is False and more:
        e.complain(at.where, f"it has no property {_names(more)}")
        return
    for name in more:
        e.apply(allowed, value[name], (at.where, name), at.resolver)


def _unknown(e: Evaluation, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value:
        e.spend(1)
        if name not in known and not any(e.matches(pattern, name) for pattern in patterns):
            yield name


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:_SHOWN_CHARACTERS]) for name in islice(names, _SHOWN_PARTS))


def _property_names(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if isinstance(value, dict):
        for name in value:
            e.apply(schema, name, at.where, at.resolver)


def _min_properties(e: Evaluation, least: Any, value: Any, at: At) -> None:
    if isinstance(value, dict) and len(value) < least:
        e.complain(at.where, f"{e.show(value)} does not have enough properties")


def _max_properties(e: Evaluation, most: Any, value: Any, at: At) -> None:
    if isinstance(value, dict) and len(value) > most:
        e.complain(at.where, f"{e.show(value)} has too many properties")


def _required(e: Evaluation, names: list[Any], value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    e.spend(len(names))
    for name in names:
        if name not in value:
            e.complain(at.where, f"{name[:_SHOWN_CHARACTERS]!r} is a required property")


def _dependent_required(e: Evaluation, given: dict[str, Any], value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    e.spend(len(given))
    for name, needed in given.items():
        if name in value:
            _required(e, needed, value, at)


def _dependent_schemas(e: Evaluation, given: dict[str, Any], value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    e.spend(len(given))
    for name, schema in given.items():
        if name in value:
            e.apply(schema, value, at.where, at.resolver)


def _dependencies(e: Evaluation, given: dict[str, Any], value: Any, at: At) -> None:
    names = {name: each for name, each in given.items() if isinstance(each, list)}
    e.spend(len(given))
    _dependent_required(e, names, value, at)
    schemas = {name: each for name, each in given.items() if not isinstance(each, list)}
    _dependent_schemas(e, schemas, value, at)


# what no keyword has looked at


def _unevaluated_items(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if isinstance(value, list):
        _unevaluated(e, schema, value, range(len(value)), at, "unevaluatedItems")


def _unevaluated_properties(e: Evaluation, schema: Any, value: Any, at: At) -> None:
    if isinstance(value, dict):
        _unevaluated(e, schema, value, value, at, "unevaluatedProperties")


def _unevaluated(
    e: Evaluation, schema: Any, value: Any, parts: Iterable[Any], at: At, own: str
) -> None:
    rest = {word: given for word, given in at.schema.items() if word not in (own, "$id")}
    e.spend(len(at.schema))
    evaluated = _evaluated(e, rest, value, at)
    for each in parts:
        if each not in evaluated:
            e.apply(schema, value[each], (at.where, each), at.resolver)


def _evaluated(e: Evaluation, schema: Any, value: Any, at: At) -> set[Any]:
    """Return the names or indexes of the parts of `value` to which a schema that it is valid under
    applies."""
    e.spend(_STEPS_PER_SCHEMA + len(value))
    if not isinstance(schema, dict):
        return set()
    at = At(schema, at.where, e.resolver_in(schema, at.resolver))
    own = _evaluated_items if isinstance(value, list) else _evaluated_properties
    e.go_deeper()
    found = own(e, schema, value, at)
    for deeper, inner in _in_place(e, schema, value, at):
        e.spend(len(value))
        found |= _evaluated(e, deeper, value, inner)
    e.come_back()
    return found


def _evaluated_items(e: Evaluation, schema: dict[str, Any], value: list[Any], at: At) -> set[Any]:
    items = schema.get("items")
    is_open = "additionalItems" in schema if isinstance(items, list) else items is not None
    if is_open or "unevaluatedItems" in schema:
        return set(range(len(value)))
    found = set(range(min(len(value), len(schema.get("prefixItems", items or ())))))
    if "contains" in schema and e.dialect.contains_evaluates:
        found |= {n for n, each in enumerate(value) if e.is_valid(schema["contains"], each, at)}
    return found


def _evaluated_properties(
    e: Evaluation, schema: dict[str, Any], value: dict[str, Any], at: At
) -> set[Any]:
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return set(value)
    return set(value) - set(_unknown(e, value, schema))


def _in_place(
    e: Evaluation, schema: dict[str, Any], value: Any, at: At
) -> Iterator[tuple[Any, At]]:
    """Yield the schemas that hold for the same value because this one does, as far as they do."""
    for word in ("$ref", "$dynamicRef"):
        if word in schema:
            resolved = _resolved(e, schema[word], at)
            yield resolved.contents, At(schema, at.where, resolved.resolver)
    if "$recursiveRef" in schema:
        resolved = e.dialect.recursive(at.resolver)
        yield resolved.contents, At(schema, at.where, resolved.resolver)
    for word in ("allOf", "anyOf", "oneOf"):
        for each in schema.get(word, ()):
            if e.is_valid(each, value, at):
                yield each, at
    if "if" in schema:
        holds = e.is_valid(schema["if"], value, at)
        if holds:
            yield schema["if"], at
        yield schema.get("then" if holds else "else"), at
    if isinstance(value, dict):
        dependent = schema.get("dependentSchemas", {})
        e.spend(len(dependent))
        for name, each in dependent.items():
            if name in value:
                yield each, at


_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_COMMON: dict[str, Keyword] = {
    "$ref": _ref, "type": _type, "enum": _enum, "const": _const,
    "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if,
    "minimum": _minimum, "maximum": _maximum, "multipleOf": _multiple_of,
    "exclusiveMinimum": _exclusive_minimum, "exclusiveMaximum": _exclusive_maximum,
    "minLength": _min_length, "maxLength": _max_length, "pattern": _pattern,
    "items": _items, "contains": _contains, "uniqueItems": _unique_items,
    "minItems": _min_items, "maxItems": _max_items,
    "properties": _properties, "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties, "propertyNames": _property_names,
    "minProperties": _min_properties, "maxProperties": _max_properties, "required": _required,
}  # fmt: skip
_SINCE_2019: dict[str, Keyword] = {
    "dependentRequired": _dependent_required, "dependentSchemas": _dependent_schemas,
    "unevaluatedItems": _unevaluated_items, "unevaluatedProperties": _unevaluated_properties,
}  # fmt: skip
DRAFT_7: dict[str, Keyword] = {
    **_COMMON, "additionalItems": _additional_items, "dependencies": _dependencies,
}  # fmt: skip
DRAFT_2019: dict[str, Keyword] = {
    **_COMMON, **_SINCE_2019, "additionalItems": _additional_items,
    "$recursiveRef": _recursive_ref,
}  # fmt: skip
DRAFT_2020: dict[str, Keyword] = {
    **_COMMON, **_SINCE_2019, "prefixItems": _prefix_items, "$dynamicRef": _ref,
}  # fmt: skip


def canonical(value: Any) -> bytes:
    """Return the same bytes for the same JSON: 1 and 1.0 are, 1 and true are not."""
    if type(value) is int:  # most members of an enum are a number or a text
        return b"%d" % value
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value

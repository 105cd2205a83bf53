"""The keywords of JSON Schema, one function each, for drafts 4 to 7, 2019-09 and 2020-12.

The meanings are those of json-schema.org.  A keyword spends steps in proportion to its own work; the
schemas below it spend theirs in `Evaluation.apply`.  `format` is an annotation and not checked.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

from .evaluation import (
    SHOWN_CHARACTERS,
    SHOWN_PARTS,
    STEPS_PER_REFERENCE,
    STEPS_PER_SCHEMA,
    At,
    Evaluation,
    Keyword,
)

# references


def _ref(e: Evaluation, reference: str, value: Any, at: At) -> None:
    resolved = _resolved(e, reference, at)
    e.apply(resolved.contents, value, at.where, resolved.resolver)


def _recursive_ref(e: Evaluation, _: Any, value: Any, at: At) -> None:
    e.spend(STEPS_PER_REFERENCE)
    resolved = e.dialect.recursive(at.resolver)
    e.apply(resolved.contents, value, at.where, resolved.resolver)


def _resolved(e: Evaluation, reference: str, at: At) -> Any:
    # The resolver walks a pointer step by step, and from its start each time.
    e.spend(STEPS_PER_REFERENCE + len(reference) + reference.count("/") ** 2)
    return at.resolver.lookup(reference)


# any value


def is_type(value: Any, name: str) -> bool:
    """Tell whether a value has a type of JSON Schema; 1.0 is an integer, true is not a number."""
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
        wanted = ", ".join(map(repr, names[:SHOWN_PARTS]))
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


# lengths, then texts


def _shortest(kind: type[str] | type[list[Any]]) -> Keyword:
    """Return the keyword for the least length of texts, or of arrays."""

    def check(e: Evaluation, least: Any, value: Any, at: At) -> None:
        if isinstance(value, kind) and len(value) < least:
            e.complain(at.where, f"{e.show(value)} is too short")

    return check


def _longest(kind: type[str] | type[list[Any]]) -> Keyword:
    """Return the keyword for the greatest length of texts, or of arrays."""

    def check(e: Evaluation, most: Any, value: Any, at: At) -> None:
        if isinstance(value, kind) and len(value) > most:
            e.complain(at.where, f"{e.show(value)} is too long")

    return check


def _pattern(e: Evaluation, pattern: str, value: Any, at: At) -> None:
    if isinstance(value, str) and not e.matches(pattern, value):
        e.complain(at.where, f"{e.show(value)} does not match {pattern[:SHOWN_CHARACTERS]!r}")


# arrays


def _items(e: Evaluation, given: Any, value: Any, at: At) -> None:
    """Check the items after `prefixItems`; before 2020-12 `items` may be a list with a schema each."""
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
        e.complain(at.where, f"must have at most {first} items, got {len(value)}")
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
        if e.cache.pattern(pattern, e.budget) is None:
            continue
        for name, each in value.items():
            if e.matches(pattern, name):
                e.apply(schema, each, (at.where, name), at.resolver)


def _additional_properties(e: Evaluation, allowed: Any, value: Any, at: At) -> None:
    if not isinstance(value, dict):
        return
    more = list(_unknown(e, value, at.schema))
    if allowed is False and more:
        e.complain(at.where, f"it has no property {_names(more)}{_meant(e, more[0], at.schema)}")
        return
    for name in more:
        e.apply(allowed, value[name], (at.where, name), at.resolver)


def _unknown(e: Evaluation, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value:
        e.spend(1)
        if name not in known and not any(e.matches(pattern, name) for pattern in patterns):
            yield name


def _meant(e: Evaluation, name: str, schema: dict[str, Any]) -> str:
    """Return the property that `name` was meant to be, for a complaint that is recorded."""
    if e.is_quiet:
        return ""
    from ...policies.similar import similar

    found = similar(name, schema.get("properties", {}))
    return f"; did you mean {_names([found])}?" if found else ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:SHOWN_CHARACTERS]) for name in islice(names, SHOWN_PARTS))


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
            e.complain(at.where, f"{name[:SHOWN_CHARACTERS]!r} is a required property")


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


# unevaluated parts: those that no other keyword applies to


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
    """Return the names or indexes of the parts of `value` that a schema evaluates."""
    e.spend(STEPS_PER_SCHEMA + len(value))
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
    """Yield the subschemas that apply to the same value, if the value is valid under them."""
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


_COMMON: dict[str, Keyword] = {
    "$ref": _ref, "type": _type, "enum": _enum, "const": _const,
    "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if,
    "minimum": _minimum, "maximum": _maximum, "multipleOf": _multiple_of,
    "exclusiveMinimum": _exclusive_minimum, "exclusiveMaximum": _exclusive_maximum,
    "minLength": _shortest(str), "maxLength": _longest(str), "pattern": _pattern,
    "items": _items, "contains": _contains, "uniqueItems": _unique_items,
    "minItems": _shortest(list), "maxItems": _longest(list),
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

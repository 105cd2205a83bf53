"""Conversion of JSON Schema to types.  A malformed schema becomes `Any`; no schema raises.

Constraints on values are ignored: the broker checks the real arguments.

Helpers that read parts of an arbitrary JSON Schema, for `reader.py`.

Named types of a schema, which may refer to each other and to themselves.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from ..schemas.spec import ToolSpec
from ..text.hidden import cut, line, prose
from .stub_types import (
    ANY,
    NONE,
    RESERVED,
    ListOf,
    MapOf,
    Named,
    Plain,
    Property,
    Record,
    ToolSignature,
    TupleOf,
    Type,
    either,
    identifier,
    literals,
    members_of,
    names_in,
    type_name,
)

MEMBERS = 24  # members of an anyOf, an allOf or a tuple
_VALUES = 64  # shown values of an enum
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
    """Return a reference's target in `root`; None if it is missing or elsewhere."""
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


_MOST = 150  # types of one schema
_MOST_WORDS = 4  # kept words of a type's name, the last ones


class Definitions:
    """Types by name; no name is one of `taken`."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._known: dict[str, Record | Type] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._known)

    @property
    def is_full(self) -> bool:
        return len(self._known) >= _MOST

    def reserve(self, words: list[str]) -> Named:
        """Return a name for a type that is defined later, so that others can refer to it."""
        name = type_name(words[-_MOST_WORDS:], self._taken)
        self._taken.add(name)
        self._known[name] = ANY
        return Named(name)

    def define(self, named: Named, definition: Record | Type) -> None:
        self._known[named.name] = definition

    def settle(self) -> None:
        """Replace each type that refers to itself only by Any."""
        for name, each in self._known.items():
            if not isinstance(each, Record) and _says_only_itself(name, self._known):
                self._known[name] = ANY

    def needed(self, roots: Iterable[Type]) -> dict[str, Record | Type]:
        """Return the definitions that `roots` use, each after those that it names."""
        waiting = list(roots)
        found: set[str] = set()
        while waiting:
            new = [name for name in names_in(waiting.pop()) if name not in found]
            found.update(new)
            for name in new:
                waiting += _types_of(self._known[name])
        return _in_order({name: each for name, each in self._known.items() if name in found})


def _types_of(definition: Record | Type) -> list[Type]:
    if isinstance(definition, Record):
        return [field.type for field in definition.fields]
    return [definition]


def _says_only_itself(name: str, definitions: dict[str, Record | Type]) -> bool:
    """Tell whether nothing but names stands between a definition and itself: no type is like that."""
    waiting, seen = [name], set[str]()
    while waiting:
        definition = definitions[waiting.pop()]
        parts = () if isinstance(definition, Record) else members_of(definition)
        names = [each.name for each in parts if isinstance(each, Named)]
        if name in names:
            return True
        waiting += [each for each in names if each not in seen]
        seen.update(names)
    return False


def _in_order(definitions: dict[str, Record | Type]) -> dict[str, Record | Type]:
    """Return definitions, each behind those that it names, as far as they do not name each other."""
    ordered: dict[str, Record | Type] = {}
    begun: set[str] = set()
    waiting = list(reversed(definitions))
    while waiting:
        name = waiting[-1]
        if name in begun:  # everything that it names is placed, or leads back to it
            ordered.setdefault(waiting.pop(), definitions[name])
            continue
        begun.add(name)
        names = (each for type in _types_of(definitions[name]) for each in names_in(type))
        waiting += reversed([each for each in names if each not in begun])
    return ordered


_DEPTH = 24  # nested schemas without a reference between them
_MERGES = 6  # nested allOf
_NODES = 4000  # schemas that are looked at, for one tool
_FIELDS = 256  # fields of one object
_LONGEST = 200  # characters of a name
_WORDS = {
    "null": NONE, "boolean": Plain("bool"), "integer": Plain("int"), "number": Plain("float"),
    "string": Plain("str"),
}  # fmt: skip


def describe(spec: ToolSpec) -> ToolSignature:
    """Return the signature of a tool, without the credentials that the broker fills in."""
    taken = {*RESERVED, identifier(spec.name.rpartition(".")[2])}
    given = _Reader(spec.parameters, [], Definitions(taken))
    fields, more = given.parameters()
    known = tuple(field for field in fields if field.wire not in spec.credentials)
    told = _Reader(spec.output_schema, ["Result"], Definitions(taken | given.definitions.names))
    result = told.whole() if spec.output_schema else ANY
    needed = given.definitions.needed(field.type for field in known)
    return ToolSignature(
        spec.name, prose(spec.description), known, more, result,
        needed | told.definitions.needed([result]),
    )  # fmt: skip


class _Reader:
    """Converts one schema; `definitions` collects its named types."""

    def __init__(self, root: object, words: list[str], definitions: Definitions) -> None:
        self._root = root
        self._words = words
        self.definitions = definitions
        self._references: dict[str, Named] = {}
        # types that are referred to, and are not yet read
        self._waiting: list[tuple[Named, Mapping[str, Any], list[str]]] = []
        self._records: dict[str, Named] = {}  # types by the schema that they were made of
        self._nodes = 0

    def parameters(self) -> tuple[tuple[Property, ...], bool]:
        """Return the properties of the whole, and whether there may be others."""
        schema = self._merged(self._root, 0)
        more = schema.get("additionalProperties", schema.get("patternProperties"))
        fields = self._fields(schema, self._words, 0)
        self._read_what_waits()
        return fields, bool(more)

    def whole(self) -> Type:
        type = self._read(self._root, self._words, 0)
        self._read_what_waits()
        return type

    def _read(self, schema: object, words: list[str], depth: int) -> Type:
        self._nodes += 1
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._nodes > _NODES:
            return ANY
        if isinstance(reference := schema.get("$ref"), str):
            return self._follow(reference)
        if "allOf" in schema:
            schema = self._merged(schema, 0)
        plain = self._alternatives(schema, words, depth)
        return either([plain, NONE]) if schema.get("nullable") is True else plain

    def _alternatives(self, schema: Mapping[str, Any], words: list[str], depth: int) -> Type:
        if "const" in schema:
            return listed([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return listed(values)
        for word in ("anyOf", "oneOf"):
            if typed := typed_members(schema.get(word)):
                rest = without(without(schema, "anyOf"), "oneOf")
                has_more = isinstance(rest.get("properties"), Mapping)
                members = [both(rest, each) if has_more else each for each in typed]
                return either([self._read(each, words, depth + 1) for each in members])
        return self._by_type(schema, words, depth)

    def _by_type(self, schema: Mapping[str, Any], words: list[str], depth: int) -> Type:
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [each for each in kind if isinstance(each, str)][:MEMBERS]
            return either([self._by_type({**schema, "type": each}, words, depth) for each in kinds])
        if not isinstance(kind, str):
            kind = implied(schema)
        if kind == "object":
            return self._object(schema, words, depth)
        if kind == "array":
            return self._array(schema, words, depth)
        return _WORDS.get(kind, ANY)

    def _object(self, schema: Mapping[str, Any], words: list[str], depth: int) -> Type:
        if isinstance(properties := schema.get("properties"), Mapping) and properties:
            return self._record(schema, words, depth)
        more = schema.get("additionalProperties")
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping) and patterns:
            values = [*patterns.values(), *([more] if isinstance(more, Mapping) else [])]
            return MapOf(either([self._read(each, words, depth + 1) for each in values[:MEMBERS]]))
        return MapOf(self._read(more, words, depth + 1))

    def _record(self, schema: Mapping[str, Any], words: list[str], depth: int) -> Type:
        """Return a type with a name; objects that are alike share one."""
        parts = [schema.get(key) for key in ("properties", "required", "description")]
        made_of = json.dumps(parts, sort_keys=True, default=str, skipkeys=True)
        if made_of in self._records:
            return self._records[made_of]
        if self.definitions.is_full:
            return MapOf(ANY)
        named = self._records[made_of] = self.definitions.reserve(words)
        self._define(named, schema, words, depth)
        return named

    def _fields(
        self, schema: Mapping[str, Any], words: list[str], depth: int
    ) -> tuple[Property, ...]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return ()
        required = schema.get("required")
        needed = (
            [each for each in required if isinstance(each, str)]
            if isinstance(required, list)
            else []
        )
        names = [name for name in properties if isinstance(name, str) and len(name) <= _LONGEST]
        return tuple(
            self._field(name, properties[name], [*words, name], depth, required=name in needed)
            for name in names[:_FIELDS]
        )

    def _field(
        self, name: str, schema: object, words: list[str], depth: int, *, required: bool
    ) -> Property:
        said = schema if isinstance(schema, Mapping) else {}
        return Property(
            name, self._read(schema, words, depth + 1), required,
            line(said.get("description"), 400), default_in(said),
        )  # fmt: skip

    def _array(self, schema: Mapping[str, Any], words: list[str], depth: int) -> Type:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):  # the form until draft 2019-09
            items, first = schema.get("additionalItems"), items
        item = [*words, "Item"]
        if not isinstance(first, list) or not first:
            return ListOf(self._read(items, item, depth + 1))
        inside = tuple(self._read(each, item, depth + 1) for each in first[:MEMBERS])
        open_end = items is not False or len(first) > MEMBERS
        return TupleOf(inside, self._read(items, item, depth + 1) if open_end else None)

    def _merged(self, schema: object, depth: int) -> dict[str, Any]:
        """Return one object schema that says what `schema` and all of its allOf say."""
        self._nodes += 1
        if not isinstance(schema, Mapping) or depth > _MERGES or self._nodes > _NODES:
            return {}
        if isinstance(reference := schema.get("$ref"), str):
            target = part_of(self._root, reference)
            return both(self._merged(target, depth + 1), without(schema, "$ref"))
        whole = without(schema, "allOf")
        parts = schema.get("allOf")
        for part in parts[:MEMBERS] if isinstance(parts, list) else ():
            whole = both(whole, self._merged(part, depth + 1))
        return whole

    def _follow(self, reference: str) -> Type:
        """Return the name of a reference's target, which is read last."""
        if reference not in self._references:
            target = part_of(self._root, reference)
            if not isinstance(target, Mapping) or self.definitions.is_full:
                return ANY
            words = [*self._words[:1], reference.rpartition("/")[2] or "Whole"]
            self._references[reference] = self.definitions.reserve(words)
            self._waiting.append((self._references[reference], target, words))
        return self._references[reference]

    def _read_what_waits(self) -> None:
        while self._waiting:
            named, target, words = self._waiting.pop(0)
            merged = self._merged(target, 0) if "allOf" in target else target
            if is_record(merged):
                self._define(named, merged, words, 0)
            else:
                self.definitions.define(named, self._read(target, words, 0))
        self.definitions.settle()

    def _define(
        self, named: Named, schema: Mapping[str, Any], words: list[str], depth: int
    ) -> None:
        fields = self._fields(schema, words, depth)
        self.definitions.define(named, Record(fields, prose(schema.get("description"), 400)))

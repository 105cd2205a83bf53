"""Conversion of JSON Schema to types.  A malformed schema becomes `Any`; no schema raises.

Constraints on values are ignored: the broker checks the real arguments.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..schemas.spec import ToolSpec
from ..text.hidden import line, prose
from .definitions import Definitions
from .names import RESERVED, identifier
from .schema_parts import (
    MEMBERS,
    both,
    default_in,
    implied,
    is_record,
    listed,
    part_of,
    typed_members,
    without,
)
from .types import (
    ANY,
    NONE,
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
)

_DEPTH = 24  # of schemas within each other, without a reference between them
_MERGES = 6  # of allOf within each other
_NODES = 4000  # schemas that are looked at, for one tool
_FIELDS = 256  # of one object
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
        self._waiting: list[tuple[Named, Mapping[str, Any], list[str]]] = []  # that are referred to
        self._records: dict[str, Named] = {}  # by what they were made of
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
        """Return the type of `schema`, of which `words` tell what it is."""
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
        if isinstance(items, list):  # as it was until draft 2019-09
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
        """Return the name of what a reference leads to, which is read when all else was."""
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

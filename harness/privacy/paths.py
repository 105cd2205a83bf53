"""Places in the JSON of tools: paths that rules name, and `x-pii` in schemas.

A path is of names with dots between; `[]` behind a name means every item of the list there, and `*`
any name.  "crm.find:customers[].name" is the name of each customer in a result of the tool crm.find;
a tool may be a glob.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .detector import KIND

_ITEMS = "[]"
_PART = re.compile(r"\[\]|[^.\[\]]+")
_MOST_SCHEMAS = 64  # that hold for one place
DECLARATION = "x-pii"
Path = tuple[str, ...]
Schema = Mapping[str, Any]


class PlaceRule(NamedTuple):
    """A rule for a place: `tool` is a glob, `kind` what stands there."""

    tool: str
    path: Path
    kind: str

    def holds_for(self, tool: str) -> bool:
        return fnmatch.fnmatchcase(tool, self.tool)


def path_rule(place: str, kind: str = "") -> PlaceRule:
    """Return the rule that `place` names: a tool, a colon, and a path."""
    tool, _, path = place.rpartition(":")
    return PlaceRule(tool, tuple(_PART.findall(path)), kind)


class ToolPlace(NamedTuple):
    """A place in the arguments or in the result of a tool: the rules that may hold there or below, each
    with the rest of its path, and the schemas that hold there.

    `above` is the kind that was declared for the object or list around it.
    """

    rules: tuple[tuple[Path, str], ...]
    schemas: tuple[Schema, ...]
    root: Schema
    path: Path = ()
    above: str = ""

    def entry(self, name: str) -> "ToolPlace":
        rules = tuple(
            (path[1:], kind) for path, kind in self.rules if path[:1] in ((name,), ("*",))
        )
        below = [each for schema in self.schemas for each in _of_entry(schema, name)]
        return self._at(rules, below, name)

    def item(self) -> "ToolPlace":
        rules = tuple((path[1:], kind) for path, kind in self.rules if path[:1] == (_ITEMS,))
        below = [each for schema in self.schemas for each in _of_items(schema)]
        return self._at(rules, below, _ITEMS)

    def _at(
        self, rules: tuple[tuple[Path, str], ...], below: Iterable[Any], step: str
    ) -> "ToolPlace":
        schemas = expanded(below, self.root)
        return ToolPlace(rules, schemas, self.root, (*self.path, step), self.kind)

    @property
    def kind(self) -> str:
        """The kind of personal data that was declared for this place, or for what it is a part of;
        empty if none was."""
        declared = [kind for path, kind in self.rules if not path]
        declared += [str(each[DECLARATION]) for each in self.schemas if DECLARATION in each]
        return next((_as_kind(each) for each in declared if each), self.above)

    @property
    def name(self) -> str:
        """The name of the entry here, or of the list whose item it is."""
        return next((step for step in reversed(self.path) if step != _ITEMS), "")

    @property
    def is_named(self) -> bool:
        """Whether a rule names this very place."""
        return any(not path for path, _ in self.rules)

    def allows(self, kind: str) -> bool:
        """Tell whether the schemas allow a value of a JSON type here, as far as they say types."""
        said = [each["type"] for each in self.schemas if "type" in each]
        return not said or any(
            kind == each or (isinstance(each, list) and kind in each) for each in said
        )

    def __str__(self) -> str:
        return ".".join(self.path).replace("." + _ITEMS, _ITEMS) or "the whole"


def place_of(rules: Iterable[PlaceRule], tool: str, schema: Schema | None) -> ToolPlace:
    """Return the place of the whole arguments, or of the whole result, of a tool."""
    root = schema or {}
    held = tuple((each.path, each.kind) for each in rules if each.holds_for(tool))
    return ToolPlace(held, expanded([root], root), root)


def _as_kind(declared: str) -> str:
    """Return a declared kind as tokens have it; "personal" if it is malformed."""
    word = re.sub("[^a-z0-9]", "", declared.lower())[:16]
    return word if KIND.fullmatch(word) else "personal"


def expanded(schemas: Iterable[Any], root: Schema) -> tuple[Schema, ...]:
    """Return schemas with those that they refer to or combine, without end in recursive ones."""
    found: list[Schema] = []
    waiting = [each for each in schemas if isinstance(each, Mapping)]
    while waiting and len(found) < _MOST_SCHEMAS:
        schema = waiting.pop()
        if any(schema is each for each in found):
            continue
        found.append(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            waiting += _referred(reference, root)
        waiting += [each for each in _combined(schema) if isinstance(each, Mapping)]
    return tuple(found)


def _combined(schema: Schema) -> list[Any]:
    """Return the schemas that may hold at the same place."""
    parts = [schema.get(word) for word in ("allOf", "anyOf", "oneOf")]
    found = [each for part in parts if isinstance(part, list) for each in part]
    dependent = schema.get("dependentSchemas")
    found += dependent.values() if isinstance(dependent, Mapping) else ()
    return found + [schema.get(word) for word in ("if", "then", "else")]


def _referred(reference: str, root: Schema) -> list[Schema]:
    """Return the schema that a reference within the same document means."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return [found] if reference.startswith("#") and isinstance(found, Mapping) else []


def _of_entry(schema: Schema, name: str) -> list[Any]:
    """Return the schemas of an entry; patterns are not tried: a server can make them slow."""
    patterns = schema.get("patternProperties")
    found = list(patterns.values()) if isinstance(patterns, Mapping) else []
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return [*found, properties[name]]
    return [*found, schema.get("additionalProperties"), schema.get("unevaluatedProperties")]


def _of_items(schema: Schema) -> list[Any]:
    first = schema.get("prefixItems")
    others = [schema.get(word) for word in ("items", "contains", "unevaluatedItems")]
    return [*others, *(first if isinstance(first, list) else ())]

"""Documents: tools and skills as search knows them, and as an agent sees them.

Pure.  Names, descriptions and schemas come from others: they are cut here and lose their hidden
characters, so that none reaches a model or a terminal.

Documents by number, by id, by name and by facet (server, state, kind, tag).

Pure.  `postings.py` has their words.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

import msgspec

from ...policies.errors import PolicyError
from ..text.hidden import visible
from .postings import MAX_CHARACTERS, squeezed

Kind = Literal["made", "host", "mcp", "skill"]
Detail = Literal["name", "summary", "full"]
# The levels, with aliases.
_DETAILS: dict[str, Detail] = {
    "name": "name", "summary": "summary", "full": "full", "brief": "summary", "detailed": "full",
}  # fmt: skip
_MAX_NAME = 128  # the longest that MCP allows
_MAX_SUMMARY = 200
_MAX_PARAMETERS = 64
_MAX_TAGS = 32
_MAX_DEPTH = 4
_MAX_BREADTH = 1000
# Keywords with schemas of the same value, or of its elements.
_INSIDE = ("anyOf", "oneOf", "allOf", "items", "prefixItems", "additionalProperties")


class Parameter(msgspec.Struct, frozen=True, gc=False):
    name: str
    description: str = ""


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A tool or a skill.  `id` is unique in an index; names need not be."""

    id: str
    name: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    tags: tuple[str, ...] = ()
    server: str = ""
    state: str = ""
    kind: Kind = "host"

    @property
    def full_name(self) -> str:
        return f"{self.server}.{self.name}" if self.server else self.name


def document_of(
    id: str, name: str, description: str, schema: Mapping[str, Any] | None = None, *,
    tags: tuple[str, ...] = (), server: str = "", state: str = "", kind: Kind = "host",
) -> Document:  # fmt: skip
    """Return the document of a tool from the texts of its author; `schema` is that of its input."""
    return Document(
        id=id, name=visible(name, _MAX_NAME), description=visible(description),
        parameters=parameters_of(schema or {}), server=visible(server, _MAX_NAME), state=state,
        tags=tuple(visible(tag, _MAX_NAME) for tag in tags[:_MAX_TAGS]), kind=kind,
    )  # fmt: skip


def parameters_of(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the properties of a JSON Schema, nested ones after their parents.

    At most 64, four levels deep.  References are not followed.
    """
    found: dict[str, str] = {}
    for name, description in _properties(schema):
        known = found.setdefault(name, description)
        if known != description and len(known) + len(description) < _MAX_SUMMARY * 2:
            found[name] = f"{known} {description}".strip()
        if len(found) >= _MAX_PARAMETERS:
            break
    return tuple(
        Parameter(visible(name, _MAX_NAME), visible(text, _MAX_SUMMARY * 2))
        for name, text in found.items()
    )


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and descriptions of properties, level by level; the schema may be malformed."""
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                yield from _own(each)
                inside += _held(each)
        level = inside[:_MAX_BREADTH]


def _own(schema: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        for name, inside in properties.items():
            text = inside.get("description") if isinstance(inside, Mapping) else ""
            if isinstance(name, str):
                yield name, text if isinstance(text, str) else ""


def _held(schema: Mapping[Any, Any]) -> Iterator[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        yield from properties.values()
    for keyword in _INSIDE:
        held = schema.get(keyword)
        yield from held if isinstance(held, list | tuple) else (held,)


def shown(document: Document, detail: str = "summary") -> dict[str, Any]:
    """Return a document as an agent reads it: its `name`, a `summary`, or in `full`.

    `brief` and `detailed` are aliases of summary and full.  Raises PolicyError for any other level.
    """
    level = _DETAILS.get(detail)
    if level is None:
        raise PolicyError(f"detail: must be one of {', '.join(_DETAILS)}, got {detail!r}")
    if level == "name":
        return {"name": document.full_name}
    if level == "summary":
        return {"name": document.full_name, "description": summary(document.description)}
    facts = {
        "description": document.description,
        "parameters": {each.name: each.description for each in document.parameters},
        "tags": list(document.tags), "state": document.state, "kind": document.kind,
    }  # fmt: skip
    return {"name": document.full_name} | {key: value for key, value in facts.items() if value}


def summary(description: str) -> str:
    """Return the first sentence of a description, on one line."""
    line = " ".join(description[: _MAX_SUMMARY * 4].split())
    sentence, end, _ = line.partition(". ")
    kept = sentence + end.strip()
    return kept if len(kept) <= _MAX_SUMMARY else kept[: _MAX_SUMMARY - 1].rstrip() + "…"


_JOINTS, _PUNCTUATION = "_-.", "\"'`()[]{}<>,;:!?."


class Filter(NamedTuple):
    """The documents that may be found: of `server`, with all `tags`, with one of `states` and one of
    `kinds`, and with one of `ids`.  A missing field filters nothing; empty `ids` allow none."""

    server: str | None = None
    tags: Collection[str] = ()
    states: Collection[str] = ()
    kinds: Collection[str] = ()
    ids: Collection[str] | None = None


class DocumentStore:
    """Documents with indexes by id, name and facet; each keeps its number until it is removed."""

    def __init__(self) -> None:
        self._next = 0
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}
        self._facets: dict[tuple[str, str], set[int]] = {}
        self._names: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, id: str) -> bool:
        return id in self._numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._documents)

    def __getitem__(self, number: int) -> Document:
        return self._documents[number]

    def number(self, id: str) -> int:
        return self._numbers[id]

    def id(self, number: int) -> str:
        return self._documents[number].id

    def add(self, document: Document) -> int:
        """Add a document with a new id, and return its number."""
        number, self._next = self._next, self._next + 1
        self._numbers[document.id], self._documents[number] = number, document
        for key in _keys(document):
            self._names.setdefault(key, set()).add(number)
        for facet in _facets(document):
            self._facets.setdefault(facet, set()).add(number)
        return number

    def remove(self, id: str) -> int | None:
        """Remove a document, and return its number; None if the id is unknown."""
        number = self._numbers.pop(id, None)
        if number is not None:
            document = self._documents.pop(number)
            for key in _keys(document):
                _take(self._names, key, number)
            for facet in _facets(document):
                _take(self._facets, facet, number)
        return number

    def allowed(self, only: Filter) -> Set[int] | None:
        """Return the documents that a filter allows; None for all."""
        sets = [self._facets.get(("tag", tag), set()) for tag in only.tags]
        if only.ids is not None:
            sets.append({self._numbers[id] for id in only.ids if id in self._numbers})
        if only.server is not None:
            sets.append(self._facets.get(("server", only.server), set()))
        for facet, values in (("state", only.states), ("kind", only.kinds)):
            if values:
                sets.append(
                    set().union(*(self._facets.get((facet, value), set()) for value in values))
                )
        return functools.reduce(set.intersection, sorted(sets, key=len)) if sets else None

    def called(self, query: str, allowed: Set[int] | None) -> list[int]:
        """Return the documents whose name equals the query, or a word of it that can only be a name."""
        found: dict[int, None] = {}
        for key in _keys_asked(query):
            numbers = self._names.get(key, ())
            for number in sorted(numbers, key=self.id):
                if allowed is None or number in allowed:
                    found[number] = None
        return list(found)


def _facets(document: Document) -> Iterator[tuple[str, str]]:
    yield "server", document.server
    yield "state", document.state
    yield "kind", document.kind
    for tag in document.tags:
        yield "tag", tag


def _keys(document: Document) -> set[str]:
    names = (document.name, document.full_name)
    return {document.id, *names, *map(squeezed, names)} - {""}


def _keys_asked(query: str) -> Iterator[str]:
    """Yield the keys of names in a query, the most explicit first.

    A word of a sentence is a name if it is not written like an ordinary word.
    """
    query = query[:MAX_CHARACTERS].strip()
    yield query
    yield squeezed(query)
    for run in query.split():
        bare = run.strip(_PUNCTUATION)
        if any(mark in bare for mark in _JOINTS) or not (bare.islower() or bare.istitle()):
            yield bare
            yield squeezed(bare)


def _take(sets: dict[Any, set[int]], key: object, number: int) -> None:
    sets[key].discard(number)
    if not sets[key]:
        del sets[key]

"""Documents: tools and skills as search knows them, and as an agent sees them.

Pure.  Names, descriptions and schemas come from others: they are cut here and lose their hidden
characters, so that none reaches a model or a terminal.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from ...policies.errors import PolicyError
from ..text.hidden import visible

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

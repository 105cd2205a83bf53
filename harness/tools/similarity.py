"""Similarity of tools: parameters of the same kinds, and the same source or description."""

import difflib
import re
from typing import Any

from ..schemas.spec import ToolSpec

NEARLY = 0.9  # one word of ten may differ; "celsius to fahrenheit" is not "fahrenheit to celsius"
_NEAR = 0.7  # as of tools that are tested against each other before anything is concluded
_MAX_WORDS = 100
_LEAST_WORDS = 2
_WORD = re.compile(r"[a-z0-9]+")
_EMPTY = frozenset(
    "a an and as at by for from given if in into is it its of on or the that this to with".split()  # noqa: SIM905
)


def shape_of(parameters: dict[str, Any]) -> str:
    """Return the sorted kinds of the parameters; their names are ignored."""
    properties = parameters.get("properties", {})
    required = parameters.get("required", ())
    kinds = [
        f"{_kind(schema)}{'' if name in required else '?'}" for name, schema in properties.items()
    ]
    return ",".join(sorted(kinds))


def _kind(schema: object) -> str:
    if not isinstance(schema, dict):
        return "any"
    if isinstance(kind := schema.get("type"), str):
        return kind
    return next((each for each in ("enum", "$ref", "anyOf", "type") if each in schema), "any")


def most_alike(spec: ToolSpec, others: list[ToolSpec]) -> ToolSpec | None:
    """Return the tool of `others` with the source of `spec`, or with nearly its description."""
    source = _source_of(spec)
    if source and (same := next((each for each in others if _does_what(each, spec, source)), None)):
        return same
    words = _words(spec.description)
    if len(words) < _LEAST_WORDS:
        return None
    found = [(_ratio(words, _words(each.description)), each) for each in others]
    ratio, best = max(found, key=lambda each: each[0], default=(0.0, None))
    return best if ratio >= NEARLY else None


def are_near(some: ToolSpec, other: ToolSpec) -> bool:
    """Tell whether two tools have the same source, or most words of their descriptions in common."""
    if (source := _source_of(some)) and source == _source_of(other):
        return True
    words, others = _words(some.description), _words(other.description)
    return min(len(words), len(others)) >= _LEAST_WORDS and _ratio(words, others) >= _NEAR


def _does_what(other: ToolSpec, spec: ToolSpec, source: str) -> bool:
    """Tell whether `other` has this source, and the permissions, calls and packages of `spec`."""
    may = (other.calls, other.grants, other.requirements) == (
        spec.calls, spec.grants, spec.requirements,
    )  # fmt: skip
    return may and _source_of(other) == source


def _source_of(spec: ToolSpec) -> str:
    """Return a source without its function's name, blank lines and trailing blanks."""
    lines = re.sub(rf"\b{re.escape(spec.function)}\b", "_", spec.source_code).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()) if spec.function else ""


def _ratio(some: list[str], others: list[str]) -> float:
    return difflib.SequenceMatcher(None, some, others, autojunk=False).ratio()


def _words(text: str) -> list[str]:
    """Return the significant words, without grammatical endings."""
    words = [word for word in _WORD.findall(text.lower()) if word not in _EMPTY]
    return [re.sub(r"(?<=\w{3})(?:ing|es|ed|(?<!s)s|e)$", "", word) for word in words[:_MAX_WORDS]]

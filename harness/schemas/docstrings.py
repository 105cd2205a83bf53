"""Docstrings, parsed into the description of a function and of each of its parameters."""

import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

_MAX_CHARACTERS = 20_000
_PARAMETERS = ("args", "arguments", "parameters", "params")
_OTHERS = ("returns", "return", "raises", "yields", "example", "examples", "note", "notes")
_FIELD = re.compile(r":(?:param|parameter|arg|argument)(?: [^:]{0,200})? \*{0,2}(\w+): ?(.*)$")
_OTHER_FIELD = re.compile(r":\w+[^:]{0,200}:")
_ENTRY = re.compile(r"\*{0,2}(\w+) ?(?:\([^)]{0,200}\))? ?: ?(.*)$")


class ParsedDocstring(NamedTuple):
    """`text` is everything before the first section; `parameters` maps names to descriptions."""

    text: str
    parameters: dict[str, str]


def read_docstring(docstring: str | None) -> ParsedDocstring:
    """Parse a docstring in the style of Google, NumPy or reStructuredText."""
    lines = inspect.cleandoc((docstring or "")[:_MAX_CHARACTERS]).split("\n")
    text: list[str] = []
    found: dict[str, list[str]] = {}
    for section, underlined, within in _sections(lines):
        if not section:
            text = within
        elif section == "fields":
            _read_fields(within, found)
        elif section in _PARAMETERS:
            _read_entries(within, found, underlined=underlined)
    parameters = {name: " ".join(filter(None, said)) for name, said in found.items()}
    return ParsedDocstring("\n".join(text).strip(), parameters)


def _sections(lines: list[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield sections as (name, whether it is underlined, lines); the text before them has no name."""
    name, underlined, within = "", False, list[str]()
    for number, line in enumerate(lines):
        below = lines[number + 1].strip() if number + 1 < len(lines) else ""
        heading = line.rstrip().removesuffix(":").lower()
        is_underlined = below[:3] == "---" and not below.strip("-")
        if heading in (*_PARAMETERS, *_OTHERS) and (line.rstrip().endswith(":") or is_underlined):
            yield name, underlined, within
            name, underlined, within = heading, is_underlined, []
        elif _OTHER_FIELD.match(line) and name != "fields":
            yield name, underlined, within
            name, underlined, within = "fields", False, [line]
        else:
            within.append(line)
    yield name, underlined, within


def _read_fields(lines: list[str], found: dict[str, list[str]]) -> None:
    said: list[str] = []
    for line in map(str.strip, lines):
        if match := _FIELD.match(line):
            said = found[match[1]] = [match[2]]
        elif _OTHER_FIELD.match(line):
            said = []
        else:
            said.append(line)


def _read_entries(lines: list[str], found: dict[str, list[str]], *, underlined: bool) -> None:
    """Read the entries of a section: a line that is indented like the first one begins an entry."""
    filled = [line for line in lines if line.strip("- ")]
    first = _indent(filled[0]) if filled else 0
    said: list[str] = []
    for line in filled:
        match = _ENTRY.match(line.strip()) if _indent(line) <= first else None
        if match:  # NumPy: the type follows the name, and the text stands on the next lines
            said = found[match[1]] = [] if underlined else [match[2]]
        elif underlined and _indent(line) <= first:
            said = found[line.strip()] = []
        else:
            said.append(line.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

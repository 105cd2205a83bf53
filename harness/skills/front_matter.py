"""Front matter of SKILL.md: a small part of YAML, read by events and written in one form.

The only module that imports PyYAML.  Every scalar stays text.  Anchors, aliases, tags, repeated keys
and deep nesting are refused before any value is made of them, so that nothing is expanded or
constructed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...policies.errors import SkillError, SkillInvalid
from ...policies.extras import how_to_install

MOST_BYTES = 16 * 1024
_MOST_EVENTS = 1000
_DEEPEST = 3  # the mapping itself, then `metadata` or a list, then nothing
_FENCE = re.compile(r"---[ \t]*")
_UNQUOTED = re.compile(r"(?m)^(description|compatibility|license):[ \t]+([^\s\"'|>\[{#&*!].*)$")

Value = str | list[str] | dict[str, str]


def split(text: str) -> tuple[str, str]:
    """Return front matter and body; raises SkillInvalid if there is no closed front matter."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if not _FENCE.fullmatch(lines[0]):
        raise SkillInvalid("SKILL.md: must begin with a line ---", "see `cellwright skills new`")
    for number, line in enumerate(lines[1:], 1):
        if _FENCE.fullmatch(line):
            return "\n".join(lines[1:number]), "\n".join(lines[number + 1 :]).strip()
    raise SkillInvalid("SKILL.md: front matter has no closing line ---")


def parse(text: str) -> dict[str, Value]:
    """Return the fields of front matter.

    Text such as `description: Use when: asked`, which is invalid YAML, is read as if it were quoted.
    Raises SkillInvalid.
    """
    if len(text.encode()) > MOST_BYTES:
        raise SkillInvalid(f"SKILL.md: front matter has more than {MOST_BYTES} bytes")
    try:
        return _fields(text)
    except SkillInvalid:
        quoted = _UNQUOTED.sub(lambda line: f"{line[1]}: {_quoted(line[2].rstrip())}", text)
        if quoted == text:
            raise
        return _fields(quoted)


def write(fields: Mapping[str, Value]) -> str:
    """Return front matter with its fences; every text is quoted."""
    lines = ["---"]
    for key, value in fields.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {_quoted(name)}: {_quoted(text)}" for name, text in value.items()]
        else:
            text = value if isinstance(value, str) else " ".join(value)
            lines.append(f"{key}: {_quoted(text)}")
    return "\n".join([*lines, "---", ""])


def _quoted(text: str) -> str:
    """Return a double-quoted scalar without `---`, which other readers take for a fence."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("\t", "\\t").replace("---", "\\x2d\\x2d\\x2d") + '"'


def _fields(text: str) -> dict[str, Value]:
    try:
        import yaml  # an extra, and seldom needed
    except ImportError:
        raise SkillError(
            f"skills: PyYAML is not installed; {how_to_install('skills')}"
        ) from None  # in the message, since that alone becomes the problem of a skill
    try:
        found = _EventReader(yaml).read(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 2}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "")
        raise SkillInvalid(f"SKILL.md: front matter is not YAML{where}: {problem}") from None
    if not isinstance(found, dict):
        raise SkillInvalid("SKILL.md: front matter must be a mapping")
    return found


class _EventReader:
    """Makes text, lists and mappings of the events of one YAML document."""

    def __init__(self, yaml: Any) -> None:
        self._yaml = yaml
        self._left = _MOST_EVENTS

    def read(self, text: str) -> Any:
        yaml = self._yaml
        events = self._bounded(yaml.parse(text, Loader=yaml.SafeLoader))
        next(events)  # the stream's start
        if not isinstance(next(events), yaml.DocumentStartEvent):
            raise SkillInvalid("SKILL.md: front matter is empty")
        value = self._node(next(events), events, 1)
        next(events)  # the document's end
        if not isinstance(next(events), yaml.StreamEndEvent):
            raise SkillInvalid("SKILL.md: front matter has a second document")
        return value

    def _bounded(self, events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            self._left -= 1
            if self._left < 0:
                raise SkillInvalid(f"SKILL.md: front matter has more than {_MOST_EVENTS} parts")
            yield event

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Any:
        yaml = self._yaml
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise SkillInvalid("SKILL.md: front matter must not have anchors or aliases")
        if event.tag:
            raise SkillInvalid(f"SKILL.md: front matter must not have tags: {event.tag[:80]!a}")
        if isinstance(event, yaml.ScalarEvent):
            return event.value
        if depth >= _DEEPEST:
            raise SkillInvalid("SKILL.md: front matter is nested too deeply")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, depth)
        return self._mapping(events, depth)

    def _sequence(self, events: Iterator[Any], depth: int) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(events), self._yaml.SequenceEndEvent):
            found.append(self._node(event, events, depth + 1))
        return found

    def _mapping(self, events: Iterator[Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(events), self._yaml.MappingEndEvent):
            key = self._node(event, events, depth + 1)
            if not isinstance(key, str):
                raise SkillInvalid("SKILL.md: keys of front matter must be text")
            if key in found:
                raise SkillInvalid(f"SKILL.md: front matter has {key[:80]!a} twice")
            found[key] = self._node(next(events), events, depth + 1)
        return found

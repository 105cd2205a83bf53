"""`SkillManifest`: the content of a SKILL.md, read leniently and written strictly.

Checks are strict for everything that identifies a skill or could deceive a reader: its name, its
description, and hidden characters.

Front matter of SKILL.md: a small part of YAML, read by events and written in one form.

The only module that imports PyYAML.  Every scalar stays text.  Anchors, aliases, tags, repeated keys
and deep nesting are refused before any value is made of them, so that nothing is expanded or
constructed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...policies.errors import SkillError, SkillInvalid
from ...policies.extras import how_to_install
from ..text.hidden import first_hidden

FILE = "SKILL.md"
PREFIX = "cellwright-"  # begins cellwright's names in `metadata`, which clients may extend
MOST_NAME, MOST_DESCRIPTION, MOST_COMPATIBILITY = 64, 1024, 500  # limits of the specification
_MOST_TEXT = 4096  # characters read of a description or licence that is too long
MOST_BODY = 64 * 1024  # characters given to a model at once
_MOST_PAIRS = 64
_FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
# ASCII only. The reference validator accepts letters of any script, which have lookalikes.
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_TOOL = re.compile(r"(?:[^\s,()]|\([^()]*\))+")
# Scanners and people stop reading at long gaps; nothing else needs them.
_PADDING = re.compile(r"(?:[ \t]*+\n){100,}+|[ \t]{1000,}+")


class SkillManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of the specification, and the instructions.

    allowed_tools: the tools that the skill asks for; a request, which grants nothing
    problems: what is not as the specification has it, but could be read
    """

    name: str
    description: str
    license: str = ""
    compatibility: str = ""
    metadata: dict[str, str] = {}
    allowed_tools: tuple[str, ...] = ()
    body: str = ""
    problems: tuple[str, ...] = ()


def maker_of(manifest: SkillManifest) -> str:
    """Return who saved a skill, as it says itself; empty for a person."""
    return manifest.metadata.get(f"{PREFIX}maker", "")


def check_name(name: object) -> str:
    """Return the name of a skill; raises SkillInvalid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MOST_NAME:
        raise SkillInvalid(
            f"name: must be 1 to {MOST_NAME} of a-z, 0-9 and single hyphens between them, "
            f"got {ascii(name)[:80]}"
        )
    return name


def read_manifest(data: bytes, folder: str = "") -> SkillManifest:
    """Return the manifest in a SKILL.md; `folder` is the name of its directory.

    Raises SkillInvalid for one that has no valid name or description, or hidden characters or padding.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SkillInvalid(f"SKILL.md: not UTF-8 at byte {error.start}") from None
    above, body = split(text)
    _check_visible("front matter", above)
    fields = parse(above)
    _check_visible("front matter", "\n".join(_texts(fields)))  # checks the unescaped texts
    _check_body(body)
    problems = [f"unknown field {name[:80]!a}" for name in fields if name not in _FIELDS]
    name = check_name(_text(fields, "name").strip())
    if folder and folder != name:
        raise SkillInvalid(f"name: must be that of the folder, {ascii(folder)[:80]}, got {name!r}")
    return SkillManifest(
        name=name,
        description=_description(fields, problems),
        license=_text(fields, "license").strip(),
        compatibility=_compatibility(fields, problems),
        metadata=_metadata(fields),
        allowed_tools=_tools(fields.get("allowed-tools", "")),
        body=body,
        problems=tuple(problems),
    )


def write_manifest(manifest: SkillManifest) -> bytes:
    """Return the SKILL.md of a manifest; raises SkillInvalid unless it follows the specification."""
    given: dict[str, Any] = {
        "name": check_name(manifest.name),
        "description": manifest.description.strip(),
        "license": manifest.license,
        "compatibility": manifest.compatibility,
        "allowed-tools": " ".join(manifest.allowed_tools),
        "metadata": dict(manifest.metadata),
    }
    fields = {key: value for key, value in given.items() if value}
    body = manifest.body.strip()
    data = f"{write(fields)}\n{body}\n".encode(errors="surrogatepass")
    again = read_manifest(data, manifest.name)
    if again.problems:
        raise SkillInvalid(f"{manifest.name}: {again.problems[0]}")
    if (again.metadata, again.allowed_tools) != (dict(manifest.metadata), manifest.allowed_tools):
        raise SkillInvalid(f"{manifest.name}: allowed_tools or metadata cannot be written")
    return data


def tools_named(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the single names of `allowed-tools`; blanks inside parentheses belong to a name."""
    texts = [given] if isinstance(given, str) else given
    return tuple(name for text in texts for name in _TOOL.findall(text))


def _check_visible(where: str, text: str) -> None:
    if character := first_hidden(text):
        raise SkillInvalid(
            f"SKILL.md: {where} has a hidden character, {character!a}",
            "remove it: a model would read what a person does not see",
        )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _check_body(body: str) -> None:
    if len(body) > MOST_BODY:
        raise SkillInvalid(
            f"SKILL.md: the body has {len(body)} characters, at most {MOST_BODY}",
            "move details to files below references/",
        )
    if padding := _PADDING.search(body):
        line = body.count("\n", 0, padding.start()) + 1
        raise SkillInvalid(f"SKILL.md: a long gap after line {line} of the body hides what follows")
    if "\0" in body:
        raise SkillInvalid("SKILL.md: the body has a NUL")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise SkillInvalid(f"SKILL.md: {name} must be text")
    if len(value) > _MOST_TEXT:
        raise SkillInvalid(f"SKILL.md: {name} has more than {_MOST_TEXT} characters")
    return value


def _description(fields: Mapping[str, Any], problems: list[str]) -> str:
    text = _text(fields, "description").strip()
    if not text:
        raise SkillInvalid("SKILL.md: description must not be empty")
    if len(text) > MOST_DESCRIPTION:
        problems.append(f"description has {len(text)} characters, at most {MOST_DESCRIPTION}")
    return text


def _compatibility(fields: Mapping[str, Any], problems: list[str]) -> str:
    text = _text(fields, "compatibility").strip()
    if "compatibility" in fields and not 1 <= len(text) <= MOST_COMPATIBILITY:
        problems.append(f"compatibility must have 1 to {MOST_COMPATIBILITY} characters")
    return text


def _metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    given = fields.get("metadata", {}) or {}
    is_map = isinstance(given, dict) and all(isinstance(each, str) for each in given.values())
    if not is_map or len(given) > _MOST_PAIRS:
        raise SkillInvalid(f"SKILL.md: metadata must map at most {_MOST_PAIRS} names to texts")
    return given


def _tools(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise SkillInvalid("SKILL.md: allowed-tools must be text or a list of texts")
    return tools_named(texts)


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
        ) from None  # in the message, because a skill's problem shows only the message
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

"""`SkillManifest`: the content of a SKILL.md, read leniently and written strictly.

What identifies a skill or could deceive a reader is never lenient: its name, its description, and
hidden characters.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...policies.errors import SkillInvalid
from ..text.hidden import first_hidden
from . import front_matter

FILE = "SKILL.md"
PREFIX = "cellwright-"  # of our names in `metadata`, which the specification leaves to clients
MOST_NAME, MOST_DESCRIPTION, MOST_COMPATIBILITY = 64, 1024, 500  # of the specification
_MOST_TEXT = 4096  # of a description or a licence that is too long, but can be read
MOST_BODY = 64 * 1024  # characters: what a model is given at once
_MOST_PAIRS = 64
_FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
# ASCII alone, where the reference validator takes letters of any script: these have lookalikes.
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
    above, body = front_matter.split(text)
    _check_visible("front matter", above)
    fields = front_matter.parse(above)
    _check_visible("front matter", "\n".join(_texts(fields)))  # what escapes stand for
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
    data = f"{front_matter.write(fields)}\n{body}\n".encode(errors="surrogatepass")
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
    """Yield every text of the fields."""
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

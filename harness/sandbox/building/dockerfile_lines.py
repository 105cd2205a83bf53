"""The lines of a Dockerfile: directives, comments, continued lines and here-documents.

The rules are those of BuildKit's parser, with the same oddities: empty lines and comments within a
continued line are dropped, and a directive counts only above everything else.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .dockerfile_words import LineError, split_words

_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*")
_FRONTENDS = re.compile(
    r"(docker\.io/)?docker/dockerfile(-upstream)?(:[\w.-]+)?(@sha256:[0-9a-f]+)?"
)
_HEREDOC = re.compile(r"(\d*)<<(-?)([^<]+)")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|\Z)")
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_MOST_BYTES = 1 << 20


class Heredoc(NamedTuple):
    """A here-document; `expands`: variables in it are replaced."""

    name: str
    content: str
    expands: bool

    @property
    def in_full(self) -> str:
        return f"{self.content}{self.name}\n"


class DockerfileLine(NamedTuple):
    """One instruction as it is written: `text` is what follows the keyword and the flags."""

    number: int
    keyword: str
    flags: dict[str, str]
    text: str
    heredocs: tuple[Heredoc, ...]


class DockerfileText(NamedTuple):
    """A Dockerfile as lines, and its escape character."""

    escape: str
    lines: tuple[DockerfileLine, ...]


def read_lines(text: str) -> DockerfileText:
    """Return the instructions of a Dockerfile; raises LineError."""
    if len(text) > _MOST_BYTES:
        raise LineError(1, f"the file is larger than {_MOST_BYTES} bytes")
    lines = text.removeprefix("\ufeff").split("\n")
    lines = [line.removesuffix("\r") for line in lines]
    escape, start = _directives(lines)
    source = iter(enumerate(lines[start:], start + 1))
    found = []
    for number, line in source:
        line = line.lstrip()
        if not line or line.startswith("#"):
            continue
        whole = _continued(line, source, escape)
        if whole.strip():
            found.append(_instruction(number, whole, source, escape))
    if not found:
        raise LineError(1, "the file has no instructions")
    return DockerfileText(escape, tuple(found))


def _directives(lines: list[str]) -> tuple[str, int]:
    """Return the escape character, and the number of lines that are directives."""
    told: dict[str, str] = {}
    for count, line in enumerate(lines):
        found = _DIRECTIVE.fullmatch(line.lstrip())
        name = found[1].lower() if found else ""
        if found is None or name not in ("syntax", "escape", "check"):
            break
        if name in told:
            raise LineError(count + 1, f"the directive {name} is there twice")
        told[name] = found[2]
        if name == "escape" and found[2] not in ("\\", "`"):
            raise LineError(count + 1, f"escape: must be \\ or `, got {found[2]!a}")
        if name == "syntax" and not _FRONTENDS.fullmatch(found[2]):
            raise LineError(
                count + 1, f"syntax: unknown frontend {found[2]!a}", "docker/dockerfile:1 is known"
            )
    return told.get("escape", "\\"), len(told)


def _continued(line: str, source: Iterator[tuple[int, str]], escape: str) -> str:
    """Return a line with those that continue it."""
    ending = re.compile(re.escape(escape) + r"[ \t]*\Z")
    parts = []
    while ending.search(line):
        parts.append(ending.sub("", line))
        line = next((each for _, each in source if each.strip() and each.lstrip()[0] != "#"), "")
    return "".join((*parts, line))


def _instruction(
    number: int, line: str, source: Iterator[tuple[int, str]], escape: str
) -> DockerfileLine:
    keyword, _, rest = line.strip().partition(" ") if " " in line else (line.strip(), "", "")
    if "\t" in keyword:
        keyword, _, more = keyword.partition("\t")
        rest = f"{more} {rest}".strip()
    keyword, rest, flags = keyword.upper(), rest.strip(), dict[str, str]()
    while found := _FLAG.match(rest):
        if found[1] in flags:
            raise LineError(number, f"{keyword}: --{found[1]} is given twice")
        flags[found[1]] = "true" if found[2] is None else found[2]
        rest = rest[found.end() :]
    heredocs = []
    if keyword in _WITH_HEREDOCS and "<<" in rest:
        heredocs = [
            _heredoc(number, mark, source) for mark in heredoc_marks(split_words(rest, escape))
        ]
    return DockerfileLine(number, keyword, flags, rest, tuple(heredocs))


def heredoc_marks(words: tuple[str, ...]) -> list[str]:
    """Return the words that begin a here-document, such as <<EOF."""
    return [word for word in words if _HEREDOC.fullmatch(word)]


def _heredoc(number: int, mark: str, source: Iterator[tuple[int, str]]) -> Heredoc:
    found = _HEREDOC.fullmatch(mark)
    assert found  # noqa: S101 - from heredoc_marks
    name = re.sub(r"[\"'\\]", "", found[3])
    kept: list[str] = []
    for _, line in source:
        line = line.lstrip("\t") if found[2] else line
        if line == name:
            return Heredoc(name, "".join(f"{each}\n" for each in kept), name == found[3])
        kept.append(line)
    raise LineError(number, f"the here-document {name} has no end")

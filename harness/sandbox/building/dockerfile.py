"""`Dockerfile`: the stages and instructions of a Dockerfile, all checked before anything is built."""

import json
import re
from typing import NamedTuple

from .dockerfile_lines import DockerfileLine, Heredoc, heredoc_marks, read_lines
from .dockerfile_words import LineError, split_words

# keyword -> the form of its arguments, and its flags
_KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "FROM": ("words", ("platform",)),
    "ARG": ("words", ()),
    "RUN": ("command", ()),
    "CMD": ("command", ()),
    "ENTRYPOINT": ("command", ()),
    "SHELL": ("command", ()),
    "COPY": ("list", ("from", "chown", "chmod", "link")),
    "ADD": ("list", ("chown", "chmod", "link")),
    "VOLUME": ("list", ()),
    "ENV": ("pairs", ()),
    "LABEL": ("pairs", ()),
    "EXPOSE": ("text", ()),
    "WORKDIR": ("text", ()),
    "USER": ("text", ()),
    "STOPSIGNAL": ("text", ()),
    "MAINTAINER": ("text", ()),
}
_REMOTE = re.compile(r"https?://|git@|git://|ssh://")
_STAGE = re.compile(r"[a-z][a-z0-9._-]*")
_MOST_INSTRUCTIONS = 1000


class Instruction(NamedTuple):
    """One instruction.

    words: its arguments before variables are replaced, of the shell form the one line; of ENV and LABEL
        names and values in turn
    is_exec: the words are a JSON array
    """

    line: int
    keyword: str
    flags: dict[str, str]
    words: tuple[str, ...]
    is_exec: bool = False
    heredocs: tuple[Heredoc, ...] = ()

    def __str__(self) -> str:
        flags = "".join(f"--{name}={value} " for name, value in self.flags.items())
        words = json.dumps(self.words) if self.is_exec else " ".join(self.words)
        return f"{self.keyword} {flags}{words}"


class BuildStage(NamedTuple):
    """A FROM and the instructions below it; `name` is in lower case, "" without one."""

    line: int
    base: str
    name: str
    platform: str
    instructions: tuple[Instruction, ...]


class Dockerfile(NamedTuple):
    """A Dockerfile; `arguments` are the ARG before the first FROM."""

    escape: str
    arguments: tuple[Instruction, ...]
    stages: tuple[BuildStage, ...]


def parse(text: str) -> Dockerfile:
    """Return the Dockerfile in `text`; raises LineError for the first invalid line."""
    escape, lines = read_lines(text)
    if len(lines) > _MOST_INSTRUCTIONS:
        raise LineError(lines[_MOST_INSTRUCTIONS].number, f"more than {_MOST_INSTRUCTIONS} lines")
    arguments: list[Instruction] = []
    stages: list[BuildStage] = []
    below: list[Instruction] = []
    for line in lines:
        found = _instruction(line, escape)
        if found.keyword == "FROM":
            below = []
            stages.append(_stage(found, stages))
        elif stages:
            below.append(found)
            stages[-1] = stages[-1]._replace(instructions=tuple(below))
        elif found.keyword == "ARG":
            arguments.append(found)
        else:
            raise LineError(found.line, f"{found.keyword} stands before the first FROM")
    if not stages:
        raise LineError(lines[-1].number, "there is no FROM")
    return Dockerfile(escape, tuple(arguments), tuple(stages))


def _instruction(line: DockerfileLine, escape: str) -> Instruction:
    number, keyword = line.number, line.keyword
    if keyword not in _KNOWN:
        raise LineError(
            number, f"{keyword[:40]!a} is not supported", f"known are {', '.join(_KNOWN)}"
        )
    form, flags = _KNOWN[keyword]
    for name in line.flags:
        if name not in flags:
            raise LineError(number, f"{keyword} --{name} is not supported")
    words, is_exec = _words(line, form, escape)
    if not words or (keyword == "SHELL" and not is_exec):
        needs = 'a JSON array, such as ["/bin/sh", "-c"]' if keyword == "SHELL" else "an argument"
        raise LineError(number, f"{keyword} needs {needs}")
    if keyword in ("COPY", "ADD"):
        _check_copy(line, words)
    return Instruction(number, keyword, line.flags, words, is_exec, line.heredocs)


def _words(line: DockerfileLine, form: str, escape: str) -> tuple[tuple[str, ...], bool]:
    if form in ("command", "list") and line.text.startswith("["):
        try:
            words = json.loads(line.text)
        except (ValueError, RecursionError):
            words = None  # as Docker does: then it is the shell form
        if words is not None:
            if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
                raise LineError(line.number, f"{line.keyword}: must be an array of texts")
            return tuple(words), True
    if form == "pairs":
        return _pairs(line, escape), False
    if form == "words":
        return split_words(line.text, escape), False
    if form == "list":
        return tuple(line.text.split()), False
    return (line.text,) if line.text else (), False


def _pairs(line: DockerfileLine, escape: str) -> tuple[str, ...]:
    """Return names and values in turn, of NAME=VALUE... or of the old form, NAME VALUE."""
    words = split_words(line.text, escape)
    if words and "=" not in words[0]:
        pair = line.text.split(None, 1)
        if len(pair) < 2:
            raise LineError(line.number, f"{line.keyword}: {pair[0]!a} has no value")
        return tuple(pair)
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise LineError(line.number, f"{line.keyword}: must be NAME=VALUE, got {word[:80]!a}")
        found += [name, value]
    return tuple(found)


def _check_copy(line: DockerfileLine, words: tuple[str, ...]) -> None:
    if len(words) < 2:
        raise LineError(line.number, f"{line.keyword} needs a source and a destination")
    sources, destination = words[:-1], words[-1]
    for source in sources:
        if _REMOTE.match(source):
            raise LineError(
                line.number, f"{line.keyword}: {source[:80]!a} is not a local file",
                "fetch it by RUN, with --allow HOST",
            )  # fmt: skip
    if len(sources) > 1 and not destination.endswith("/"):
        raise LineError(
            line.number, f"{line.keyword}: of several sources the destination must end with /"
        )
    marks = heredoc_marks(words)
    if destination in marks:
        raise LineError(line.number, f"{line.keyword}: a here-document cannot be the destination")
    if "from" in line.flags and marks:
        raise LineError(line.number, "COPY: a here-document cannot be combined with --from")


def _stage(line: Instruction, above: list[BuildStage]) -> BuildStage:
    words = line.words
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
        raise LineError(line.line, "FROM: must be FROM IMAGE [AS NAME]")
    name = words[2].lower() if len(words) == 3 else ""
    if name and not _STAGE.fullmatch(name):
        raise LineError(line.line, f"FROM: invalid name of a stage: {name[:80]!a}")
    if name and name in [each.name for each in above]:
        raise LineError(line.line, f"FROM: a stage {name!a} is there already")
    return BuildStage(line.line, words[0], name, line.flags.get("platform", ""), ())

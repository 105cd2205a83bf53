"""Completion scripts of bash, zsh and fish, generated from the places of the command line.

Places of the command line: each command with its possible words, read from the parser.

The completion scripts are made from these.
"""

import argparse
import importlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ....policies.languages import language_names
from ....policies.languages.table import language_table
from ....policies.policy import CGROUP, OPTIONAL_LAYERS
from ....policies.profiles.loading import profile_names
from ..commands import COMMANDS
from ..parsing import commands_of, summary_of
from .help import TOPICS

_FILES = frozenset((
    "DIR", "FILE", "FOLDER", "HOST[:NAME]", "HOST[:PATH]", "PACKAGE", "PAGE", "PATH", "SOURCE", "TOML",
))  # fmt: skip
_LONGEST_HELP = 90  # characters beside a word


class Values(NamedTuple):
    """The values of an option or argument: known words, stored names, or files."""

    words: tuple[str, ...] = ()
    names: str = ""  # one of completion.NAMES
    has_files: bool = False


class Option(NamedTuple):
    """An option in one of its spellings; `values` is None if it takes none, or need not."""

    name: str
    help: str
    values: Values | None


class CommandPlace(NamedTuple):
    """A command: its words, and the words that may follow."""

    words: str
    commands: dict[str, str]  # with their summaries
    options: tuple[Option, ...]
    values: Values


_POLICY = Values(profile_names(), has_files=True)
_OPTIONS = {
    "--policy": _POLICY,
    "--diff": _POLICY,
    "--language": Values((*language_names(), *language_table().names())),
    "--optional": Values((*OPTIONAL_LAYERS, CGROUP)),
    "--workspace": Values(names="workspaces"),
    "--calls": Values(names="tools"),
    "--packages": Values(has_files=True),
}
# (first word of the command, argument) -> what the argument takes
_ARGUMENTS = {
    ("env", "id"): Values(names="sets"),
    ("image", "reference"): Values(names="images", has_files=True),
    ("skills", "name"): Values(names="skills"),
    ("tools", "name"): Values(names="tools"),
    ("workspace", "name"): Values(names="workspaces"),
    ("shell", "words"): Values(has_files=True),
}


def places(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[CommandPlace]:
    """Yield the place of `parser`, at the end of `words`, then those of its commands."""
    below = commands_of(parser)
    taken = [_argument(words, each) for each in parser._actions if not each.option_strings]
    if words == ("help",):
        taken = [Values((*COMMANDS, *TOPICS))]
    elif words == ("bench",):  # imported by name when needed
        bench = importlib.import_module(".bench", __package__)
        taken = [Values(bench.BENCHMARK_NAMES)]
    yield CommandPlace(
        " ".join(words),
        {name: summary_of(parser, name) for name, _ in below},
        tuple(_options(parser)),
        Values(
            tuple(word for each in taken for word in each.words),
            next((each.names for each in taken if each.names), ""),
            any(each.has_files for each in taken),
        ),
    )
    for name, each in below:
        yield from places(each, (*words, name))


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        text = " ".join(formatter._expand_help(action).split()) if action.help else ""
        short = text if len(text) <= _LONGEST_HELP else f"{text[: _LONGEST_HELP - 1]}…"
        for name in action.option_strings:
            takes = None if action.nargs in (0, "?") else _values(action, _OPTIONS.get(name))
            yield Option(name, short, takes)


def _argument(words: tuple[str, ...], action: argparse.Action) -> Values:
    if isinstance(action, argparse._SubParsersAction):
        return Values()
    return _values(action, _ARGUMENTS.get((words[0], action.dest)) if words else None)


def _values(action: argparse.Action, known: Values | None) -> Values:
    if action.choices:
        return Values(tuple(map(str, action.choices)))
    return known or Values(has_files=action.metavar in _FILES)


_BEFORE = {"bash": '"${COMP_WORDS[@]:1:COMP_CWORD-1}"', "zsh": '"${(@)words[2,CURRENT-1]}"'}
_NAMES = "(eval (commandline -opc)[1] completion --names {} 2>/dev/null)"


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of completion.SHELLS; `parser` has the arguments of every command."""
    found = tuple(places(parser))
    templates = tomllib.loads(Path(__file__).with_name("completion.toml").read_text())
    if shell == "fish":
        return "\n".join(_fish(templates["fish"].rstrip(), found)) + "\n"
    words = _words_of_bash if shell == "bash" else _words_of_zsh
    choice = (
        templates["choice"]
        .replace("@BEFORE@", _BEFORE[shell])
        .replace("@FILES@", "_files" if shell == "zsh" else ":")
        .replace("@PLACES@", "|".join(f'"{each.words}"' for each in found if each.words))
        .replace("@VALUES@", "\n".join(_value_cases(found, words)))
        .replace("@OPTIONS@", "\n".join(_option_cases(found, words)))
        .replace("@WORDS@", "\n".join(_word_cases(found, words)))
    )
    return str(templates[shell].replace("@CHOICE@\n", choice))


Words = Callable[[dict[str, str]], str]  # words with their meanings, as an assignment


def _words_of_bash(words: dict[str, str]) -> str:
    return f'words="{" ".join(words)}"'


def _words_of_zsh(words: dict[str, str]) -> str:
    return f"found=({' '.join(_quoted(_described(*each)) for each in words.items())})"


def _described(word: str, meaning: str) -> str:
    word = word.replace(":", r"\:")
    return f"{word}:{meaning}" if meaning else word


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _assignments(values: Values, words: Words, commands: dict[str, str]) -> str:
    """Return assignments of the possible words, for bash or zsh."""
    known = commands | dict.fromkeys(values.words, "")
    parts = [words(known)] if known else []
    parts += [f"names={values.names}"] if values.names else []
    parts += ["files=1"] if values.has_files else []
    return "; ".join(parts) or ":"


def _value_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    """Yield a case for each group of options that take the same, wherever they occur."""
    groups: dict[Values, list[str]] = {}
    taken = [(each, option) for each in found for option in each.options if option.values]
    for name in dict.fromkeys(option.name for _, option in taken):
        here = [(place, option) for place, option in taken if option.name == name]
        everywhere = [o.values for p in found for o in p.options if o.name == name]
        if len(set(everywhere)) == 1:
            groups.setdefault(here[0][1].values or Values(), []).append(f'*" {name}"')
            continue
        for place, option in here:
            groups.setdefault(option.values or Values(), []).append(f'"{place.words} {name}"')
    for values, patterns in groups.items():
        yield f"        {'|'.join(patterns)}) {_assignments(values, words, {})} ;;"


def _option_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    for place in found:
        known = {option.name: option.help for option in place.options}
        yield f'                "{place.words}") {words(known)} ;;'


def _word_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    for place in found:
        yield f'                "{place.words}") {_assignments(place.values, words, place.commands)} ;;'


def _fish(template: str, found: tuple[CommandPlace, ...]) -> Iterator[str]:
    yield template.replace("@PLACES@", " ".join(f"'{each.words}'" for each in found if each.words))
    for place in found:
        line = f"complete -c cellwright -n '__cellwright_at {place.words}'"
        for name, summary in place.commands.items():
            yield f"{line} -a {name} -d {_quoted_for_fish(summary)}"
        if taken := _fish_values(place.values):
            yield f"{line}{' -F' if place.values.has_files else ''}{taken}"
        elif place.values.has_files:
            yield f"{line} -F"
        for option in place.options:
            yield f"{line} {_fish_option(option)}"


def _fish_option(option: Option) -> str:
    name = option.name
    spelt = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    if option.values is not None:
        spelt += (" -r -F" if option.values.has_files else " -x") + _fish_values(option.values)
    return f"{spelt} -d {_quoted_for_fish(option.help)}"


def _fish_values(values: Values) -> str:
    known = " ".join((*values.words, *([_NAMES.format(values.names)] if values.names else ())))
    return f" -a {_quoted_for_fish(known)}" if known else ""


def _quoted_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

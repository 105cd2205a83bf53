"""Places of the command line: each command, with what may follow it; read from the parser.

The completion scripts are made from these.
"""

import argparse
import importlib
from collections.abc import Iterator
from typing import NamedTuple

from ...policies.languages import language_names
from ...policies.loading import profile_names
from ...policies.policy import CGROUP, OPTIONAL_LAYERS
from .commands import COMMANDS
from .help import TOPICS
from .parsing import commands_of, summary_of

_FILES = frozenset((
    "DIR", "FILE", "FOLDER", "HOST[:NAME]", "HOST[:PATH]", "PACKAGE", "PAGE", "PATH", "SOURCE", "TOML",
))  # fmt: skip
_LONGEST_HELP = 90  # characters beside a word


class Values(NamedTuple):
    """What an option or an argument takes: known words, names that are kept, or files."""

    words: tuple[str, ...] = ()
    names: str = ""  # one of completion.NAMES
    has_files: bool = False


class Option(NamedTuple):
    """An option in one of its spellings; `values` is None if it takes none, or need not."""

    name: str
    help: str
    values: Values | None


class CommandPlace(NamedTuple):
    """A command, as the words that lead to it, and what may follow."""

    words: str
    commands: dict[str, str]  # with their summaries
    options: tuple[Option, ...]
    values: Values


_POLICY = Values(profile_names(), has_files=True)
_OPTIONS = {
    "--policy": _POLICY,
    "--diff": _POLICY,
    "--language": Values(language_names()),
    "--optional": Values((*OPTIONAL_LAYERS, CGROUP)),
    "--workspace": Values(names="workspaces"),
    "--calls": Values(names="tools"),
    "--packages": Values(has_files=True),
}
# (the first word of the command, the argument): what it takes
_ARGUMENTS = {
    ("env", "id"): Values(names="sets"),
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
    elif words == ("bench",):  # a module that is imported by its name, when it is needed
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

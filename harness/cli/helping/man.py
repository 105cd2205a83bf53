"""`cellwright man`: prints the manual page (man(7)), which is generated from the parser."""

import argparse
import os
import re
import time
from collections.abc import Iterator

from ...version import installed_version
from ..commands import complete_parser
from ..exit_status import EXIT_CODES
from ..options import SUCCEEDED
from ..parsing import commands_of, summary_of

_LONGEST = 78  # characters of a line of text
_ENVIRONMENT = {
    "CELLWRIGHT_CGROUP_ROOT": "The directory in which control groups are made.",
    "NO_COLOR": "If set, output has no colours.",
    "FORCE_COLOR": "If set, and NO_COLOR is not, output has colours in a pipe or file too.",
    "XDG_STATE_HOME": "The directory of workspaces, sets of packages, skills and history; default "
    "~/.local/state.",
    "XDG_DATA_HOME": "The directory of tools; default ~/.local/share.",
    "XDG_CACHE_HOME": "The directory of compiled plans; default ~/.cache.",
    "XDG_RUNTIME_DIR": "The directory of the daemon's socket.",
}
_EXAMPLES = {
    "cellwright run -c 'print(sum(range(10)))'": "Run a program in a fresh cell.",
    "cellwright run --policy standard --timeout 5 report.py -- --year 2026":
        "Run a file with arguments, under a profile and a limit.",
    "cellwright doctor": "Test every layer of this host.",
}  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(_: argparse.Namespace) -> int:
    print(manual_page(complete_parser()))
    return SUCCEEDED


def manual_page(parser: argparse.ArgumentParser) -> str:
    """Return the page; `parser` has the arguments of every command."""
    version = installed_version() or ""
    name = parser.prog
    return "\n".join((
        f'.TH {name.upper()} 1 {_date()} "{name} {version}" "User Commands"',
        ".SH NAME",
        rf"{name} \- run untrusted programs, each in its own cell",
        ".SH SYNOPSIS",
        rf"\fB{name}\fR \fICOMMAND\fR [\fIOPTION\fR]...",
        ".SH DESCRIPTION",
        *_text(f"{parser.description} The kernel keeps the program away from files, network and "
               "processes of the host. If a required layer of isolation is missing, nothing runs."),
        ".SH OPTIONS",
        *_options(parser),
        ".SH COMMANDS",
        *_commands(parser),
        ".SH EXIT STATUS",
        *_list(EXIT_CODES),
        ".SH ENVIRONMENT",
        *_list(_ENVIRONMENT),
        ".SH EXAMPLES",
        *_list(_EXAMPLES),
    ))  # fmt: skip


def _date() -> str:
    """Return the date of these files: the page is the same until another version is installed."""
    return time.strftime("%Y-%m-%d", time.gmtime(os.stat(__file__).st_mtime))


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, each in commands_of(parser):
        yield f".SS {_plain(each.prog)}"
        yield from _text(f"{_sentence(summary_of(parser, name))}")
        yield ".PP"
        yield from _synopsis(each)
        yield from _options(each)
        yield from _commands(each)


def _synopsis(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the usage of a command, in bold: `%(prog)s` is part of it."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield rf"\fB{_plain(parser.prog)}\fR"
    yield from _text(usage.removeprefix(parser.prog).strip())


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or not action.help:
            continue
        if isinstance(action, argparse._HelpAction) and " " in parser.prog:
            continue  # the page has described this option for all commands
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        value = f"[{value}]" if value and action.nargs == "?" and action.option_strings else value
        names = ", ".join(rf"\fB{_plain(option)}\fR" for option in action.option_strings)
        yield ".TP"
        yield " ".join(filter(None, (names, rf"\fI{_plain(value)}\fR" if value else "")))
        yield from _text(formatter._expand_help(action))


def _list(items: dict[str, str]) -> Iterator[str]:
    for name, text in items.items():
        yield ".TP"
        yield rf"\fB{_plain(name)}\fR"
        yield from _text(text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _text(text: str) -> Iterator[str]:
    """Yield lines of `text`: short ones, and each sentence begins one, as man(7) wants it."""
    for sentence in re.split(r"(?<=[a-z)][.?]) +(?=[A-Z])", text):
        line = ""
        for word in sentence.split():
            if line and len(_plain(f"{line} {word}")) > _LONGEST:
                yield _plain(line)
                line = ""
            line = f"{line} {word}".strip()
        if line:
            yield _plain(line)


def _plain(text: str) -> str:
    """Return `text` escaped for roff, which then takes none of it as a request, and keeps ASCII as it
    is typed: man(7) prints `-`, `'`, a grave accent, `^` and `~` as other characters."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    for character, name in (("'", "aq"), ("`", "ga"), ("^", "ha"), ("~", "ti")):
        text = text.replace(character, rf"\({name}")
    return rf"\&{text}" if text[:1] == "." else text

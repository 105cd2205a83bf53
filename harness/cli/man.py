"""`cellwright man`: prints the manual page (man(7)), which is generated from the parser."""

import argparse
from collections.abc import Iterator

from ..version import installed_version
from .commands import complete_parser
from .options import SUCCEEDED
from .parsing import commands_of, summary_of

_END = """\
.SH EXIT STATUS
0: the program succeeded.
1: the program failed.
2: wrong usage.
70: the sandbox failed, or the output cannot be written.
130: interrupted by Ctrl\\-C.
141: the reader of the output has closed it.
.SH ENVIRONMENT
.TP
CELLWRIGHT_CGROUP_ROOT
the directory in which control groups are made
.TP
NO_COLOR
if set, output to a terminal has no colours
.TP
XDG_STATE_HOME, XDG_CACHE_HOME, XDG_RUNTIME_DIR
the directories of workspaces and history, of compiled plans, and of the daemon's socket
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(_: argparse.Namespace) -> int:
    print(manual_page(complete_parser()), end="")
    return SUCCEEDED


def manual_page(parser: argparse.ArgumentParser) -> str:
    """Return the page; `parser` has the arguments of every command."""
    version = installed_version() or ""
    return "\n".join((
        f'.TH CELLWRIGHT 1 "" "cellwright {version}"',
        ".SH NAME",
        rf"cellwright \- {_plain(parser.description or '')}",
        ".SH SYNOPSIS",
        ".B cellwright",
        r"\fICOMMAND\fR ...",
        ".SH OPTIONS",
        *_options(parser),
        ".SH COMMANDS",
        *_commands(parser, ""),
        _END,
    ))  # fmt: skip


def _commands(parser: argparse.ArgumentParser, above: str) -> Iterator[str]:
    for name, each in commands_of(parser):
        yield f".SS {_plain(each.prog)}"
        yield _plain(summary_of(parser, name)) + "."
        yield from _options(each)
        yield from _commands(each, each.prog)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or not action.help:
            continue
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        names = ", ".join(rf"\fB{_plain(option)}\fR" for option in action.option_strings)
        yield ".TP"
        yield " ".join(filter(None, (names, rf"\fI{_plain(value)}\fR" if value else "")))
        yield _plain(formatter._expand_help(action))


def _plain(text: str) -> str:
    """Return `text` escaped for roff, which then takes none of it as a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text[:1] in (".", "'") else text

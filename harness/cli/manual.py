"""The manual page, written from the parser (man(7))."""

import argparse
from collections.abc import Iterator

from ..version import installed_version
from .parsing import commands_of, summary_of

_END = """\
.SH EXIT STATUS
0: the program ran well.
1: it failed.
2: wrong usage.
70: the sandbox failed, or the output cannot be written.
130: Ctrl\\-C.
141: nobody reads the output any more.
.SH ENVIRONMENT
.TP
CELLWRIGHT_CGROUP_ROOT
a directory in which to make control groups
.TP
NO_COLOR
if set, nothing is coloured on a terminal
.TP
XDG_STATE_HOME, XDG_CACHE_HOME, XDG_RUNTIME_DIR
where workspaces and history, compiled plans, and the socket of the daemon lie
"""


def manual(parser: argparse.ArgumentParser) -> str:
    """Return the page; `parser` knows every option of every command."""
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
    """Return text of which roff takes nothing as its own."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text[:1] in (".", "'") else text

"""Lines typed at a prompt or read from a pipe, and the programs that they make up."""

import codeop
import contextlib
import os
import sys
import warnings
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from pathlib import Path
from typing import Protocol

from ....policies.languages import PYTHON

_HISTORY_LINES = 1000
_SHELLS = ("bash", "sh")
_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


class PromptReader(Protocol):
    """A source of lines; `is_interactive` if a person types them."""

    is_interactive: bool

    def read(self, prompt: str) -> str:
        """Return the next line; raises EOFError after the last."""

    def close(self) -> None:
        """Save the history, if there is one."""


def reader_of_stdin(history: Path) -> PromptReader:
    """Return a reader with editing and the history file `history` on a terminal, else a plain one."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _TerminalReader(history)
    return _PipeReader()


class _TerminalReader:
    is_interactive = True

    def __init__(self, history: Path) -> None:
        import readline

        self._readline = readline
        self._history = history
        readline.parse_and_bind(
            "tab: tab-insert"
        )  # by default it completes names of the host's files
        readline.set_history_length(_HISTORY_LINES)
        with contextlib.suppress(OSError):  # a prompt works without a history
            history.parent.mkdir(0o700, parents=True, exist_ok=True)
            os.close(os.open(history, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            readline.read_history_file(history)

    def read(self, prompt: str) -> str:
        return input(prompt)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._readline.write_history_file(self._history)
            os.chmod(self._history, 0o600)


class _PipeReader:
    is_interactive = False

    def read(self, prompt: str) -> str:
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", "surrogateescape").removesuffix("\n")

    def close(self) -> None:
        return


class ProgramBuffer:
    """The lines of a program that is not complete yet.

    A Python program continues after a line that cannot end it, and after a block until an empty line
    or a line that cannot belong to it.  Other languages continue after a line that ends in a backslash.
    Between programs a line may be a command of the repl.
    """

    def __init__(self, language: str) -> None:
        self._language = language
        self._lines: list[str] = []

    @property
    def is_pending(self) -> bool:
        return bool(self._lines)

    def clear(self) -> None:
        self._lines = []

    def add(self, text: str) -> list[str]:
        """Add one line, or the lines of a paste; return the programs that they complete, and the
        commands among them (`is_command`)."""
        if "\n" in text and not self._lines and self._language == PYTHON and _is_program(text):
            return [text]
        return [each for line in text.split("\n") for each in self._add_line(line)]

    def finish(self) -> list[str]:
        """Return the rest, complete or not, unless it is blank."""
        whole, self._lines = "\n".join(self._lines), []
        return [whole] if whole.strip() else []

    def _add_line(self, line: str) -> list[str]:
        if not self._lines and is_command(line):
            return [line]
        return self._add_python(line) if self._language == PYTHON else self._add_other(line)

    def _add_python(self, line: str) -> list[str]:
        before = "\n".join(self._lines)
        if before and line[:1].strip() and _is_program(before) and _is_wrong(f"{before}\n{line}"):
            return [*self.finish(), *self._add_line(line)]
        self._lines.append(line)
        whole = "\n".join(self._lines)
        return [] if _is_wrong(whole) is None else self.finish()

    def _add_other(self, line: str) -> list[str]:
        continues = line.endswith("\\")
        kept = line[:-1] if continues and self._language not in _SHELLS else line
        self._lines.append(kept)
        return [] if continues else self.finish()


def is_command(line: str) -> bool:
    """Tell whether a line, or a program, is a command of the repl; no Python program is."""
    return line.startswith(":") and line[1:2].isalpha()


def _is_program(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cell will print it
        try:
            compile(source, "", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except _COMPILE_ERRORS:
            return False
    return True


def _is_wrong(source: str) -> bool | None:
    """Tell whether `source` has a syntax error; None if more lines could complete it."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return None if compiler(source, "", "single") is None else False
    except _COMPILE_ERRORS:
        return True

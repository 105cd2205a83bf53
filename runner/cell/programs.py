"""Turning the guest's process into an interpreter of another language, or into any other program.

The process waits in its cell, confined, until a program comes; then it becomes the interpreter, so
that only the interpreter's own start is left to be paid.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import json
import os
from collections.abc import Callable
from typing import NoReturn

from ...policies.languages import LANGUAGES, TOOL_CLIENT, as_environment, interpreter_of
from ...policies.plan import Plan
from ..messages import Become, Finished, InputFile, RunProgram, Start
from .exchange import report_to, write

_SOURCE = "/tmp/cell"  # noqa: S108 - the cell's own; error messages name it
_GIVEN = "/tmp/cell.json"  # noqa: S108 - the cell's own; the harness removes it


def _text_of(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name)) as file:
        return file.read()


_HARNESSES = {  # read while our files can be
    "javascript": _text_of("harness.js"),
    "ruby": _text_of("harness.rb"),
}
# Of a shell in a session: what programs seldom use of the descriptors that sh(1) can name.
_SHELLS_STDERR, _SHELLS_CONTROL = 8, 9
# An interactive bash reads the one, and for the other asks for the user's name, by a socket.
_NO_HISTORY_NO_MAIL = {"HISTFILE": "", "MAILPATH": ""}


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class Interpreter:
    """How to run programs of the plan's language."""

    def __init__(self, plan: Plan) -> None:
        self._language = LANGUAGES[plan.language]
        if self._language.is_shell and os.path.basename(plan.program) == "bash":
            self._language = LANGUAGES["bash"]._replace(program=self._language.program)
        self._name = plan.language
        self._path = plan.program
        self._source = _SOURCE + LANGUAGES[plan.language].suffix
        self._first = ""  # what bash reads before the program
        self._harness = _HARNESSES.get(interpreter_of(plan.language), "")

    def become(self, asked: RunProgram | Start, control: int) -> NoReturn:
        """Become the interpreter; exits with 127, as a shell does, if that fails.

        One with a harness keeps the control socket, to say what programs came to; of a shell that runs
        one program the kernel tells.
        """

        def interpret() -> None:
            if isinstance(asked, RunProgram):
                self._run(asked, control)
            else:
                self._converse(control)

        _become(self._name, asked.files, interpret, control)

    def _run(self, run: RunProgram, control: int) -> None:
        if self._language.is_shell or run.filename.endswith(os.path.splitext(self._source)[1]):
            name = os.path.basename(run.filename)  # messages have it
            self._source = os.path.join(os.path.dirname(_SOURCE), name) if name else self._source
        _write_text(self._source, run.code)
        if self._harness:
            given = {
                "path": self._source, "inputs": json.loads(run.inputs),
                "environment": run.environment, "limit": run.value_bytes,
                "tools": list(run.tools), "arguments": run.arguments,
                "sites": run.sites,
            }  # fmt: skip
            _write_text(_GIVEN, json.dumps(given))
            os.set_inheritable(control, True)
            self._execute(*self._with_harness(_GIVEN))
        os.environ.update(run.environment)
        os.environ.update(as_environment(run.inputs))
        self._execute(*self._language.arguments, *self._source_of(run), *run.arguments)

    def _source_of(self, run: RunProgram) -> tuple[str, ...]:
        """Return what names the program, behind the command that calls tools if it has any.

        Only bash has a variable for that; it keeps the program from running as part of another, whose
        traps would see it fail twice.
        """
        if not run.tools:
            return (self._source,)
        self._first = TOOL_CLIENT if self._name == "bash" else ""
        return (self._source,) if self._first else ("-c", f'. {TOOL_CLIENT}\n. "$0"', self._source)

    def _converse(self, control: int) -> None:
        if self._harness:
            os.set_inheritable(control, True)
            self._execute(*self._with_harness())
        os.dup2(2, _SHELLS_STDERR)
        os.dup2(control, _SHELLS_CONTROL)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)  # until it is told where stderr is
        os.environ.update(_NO_HISTORY_NO_MAIL)
        self._execute(*self._language.arguments, *self._language.conversing)

    def _with_harness(self, *given: str) -> tuple[str, ...]:
        return (*self._language.arguments, "-e", self._harness, "--", self._name, *given)

    def _execute(self, *arguments: str) -> None:
        for name in self._language.start_up:
            os.environ.pop(name, None)
        if self._first:
            os.environ["BASH_ENV"] = self._first
        if self._language.is_shell:
            os.environ.setdefault("SHELL", self._path)  # or bash asks for the user's, by a socket
        command = [self._language.program, *arguments]
        os.execve(self._path, command, dict(os.environ))  # noqa: S606 - no shell is wanted


def become_program(asked: Become, control: int) -> NoReturn:
    """Become the program that is asked for, with its environment and no descriptor but 0, 1 and 2;
    exits with 127 if that fails."""

    def replace() -> None:
        os.chdir(asked.directory)
        os.execve(asked.arguments[0], asked.arguments, asked.environment)  # noqa: S606 - as above

    _become(asked.arguments[0], asked.files, replace, control)


def _become(
    name: str, files: tuple[InputFile, ...], replace: Callable[[], None], control: int
) -> NoReturn:
    """Write `files` and have this process replaced; say so if it was not."""
    try:
        for file in files:
            write(file)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them; others do not
            _signal.signal(number, _signal.SIG_DFL)
        replace()
    except OSError as error:
        text = f"{name} cannot start: {error.filename}: {error.strerror}"
        report_to(control, Finished(None, None, text, None, exit_code=127))
        os.write(2, f"{text}\n".encode())
    os._exit(127)

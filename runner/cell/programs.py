"""Turning the guest's process into an interpreter of another language.

The process waits in its cell, confined, until a program comes; then it becomes the interpreter, so
that only the interpreter's own start is left to be paid.
"""

import json
import os
import signal
from pathlib import Path
from typing import NoReturn

from ...policies.languages import LANGUAGES
from ...policies.plan import Plan
from ..messages import Run
from .exchange import write

_SOURCE = "/tmp/cell"  # noqa: S108 - the cell's own; error messages name it
_HARNESSES = {  # read while our files can be
    "javascript": Path(__file__).with_name("harness.js").read_text(),
    "ruby": Path(__file__).with_name("harness.rb").read_text(),
}


class Interpreter:
    """How to run programs of the plan's language."""

    def __init__(self, plan: Plan) -> None:
        language = LANGUAGES[plan.language]
        self._path = plan.program
        self._command = [language.program, *language.arguments]
        self._source = _SOURCE + language.suffix
        self._harness = _HARNESSES.get(plan.language, "")

    def run(self, run: Run, control: int) -> NoReturn:
        """Become the interpreter of `run`; exits with 127, as a shell does, if that fails.

        One with a harness keeps the control socket, to say what the program came to; of the others
        the kernel tells.
        """
        try:
            self._become(run, control)
        except OSError as error:
            os.write(2, f"cannot start {self._path}: {error.strerror}\n".encode())
        os._exit(127)

    def _become(self, run: Run, control: int) -> None:
        for file in run.files:
            write(file)
        Path(self._source).write_text(run.code)
        os.environ.update(run.environment)
        command = [*self._command, self._source]
        if self._harness:
            given = (self._source, run.inputs.decode(), str(run.value_bytes))
            command = [*self._command, "-e", self._harness, "--", *given]
            os.set_inheritable(control, True)
        else:
            os.environ.setdefault("SHELL", self._path)  # or bash asks for the user's, by a socket
            os.environ.update(_as_environment(run.inputs))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; others do not
            signal.signal(number, signal.SIG_DFL)
        os.execve(self._path, command, dict(os.environ))  # noqa: S606 - no shell is wanted


def _as_environment(inputs: bytes) -> dict[str, str]:
    """Return inputs as a shell can have them: text as it is, the rest as JSON."""
    given = json.loads(inputs)
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
    }

"""`BackgroundProcess`: a command of a session that goes on after the call that started it."""

import base64
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import PolicyError, SessionLost
from ...policies.languages import PYTHON
from ...policies.policy import Limits
from ...runner.result import SandboxResult
from .commands import argv_of, refuse_without_subprocesses
from .parameters import CallArguments, CommandArguments
from .request import as_bytes, check_environment

_READ_BYTES = 256 * 1024  # at most in one call, whatever is asked for
_WRITE_BYTES = 256 * 1024
_TURN_SECONDS = 1.0  # of a wait in the cell; then other calls of the session get their turn

# An expression, so that no name stays in the session: the module is kept where no program looks.
_MODULE = "_cellwright_processes"
_LOADED = (
    "(__import__('sys').modules.get({name!r}) or (lambda module: (exec({text!r}, module.__dict__), "
    "__import__('sys').modules.setdefault({name!r}, module))[1])"
    "(__import__('types').ModuleType({name!r})))"
)  # fmt: skip


class _ProcessReport(NamedTuple):
    """The cell's word on a process, which is believed about nothing but the process."""

    id: int
    pid: int
    argv: tuple[str, ...]
    exit_code: int | None
    dropped: int


_Execute = Callable[[CallArguments], SandboxResult]


class BackgroundProcess:
    """A background command of a session.  Made by `Session.start_command`; safe from many threads.

    `id`: its number in the session.  `command`: the program and its arguments.  `pid`: in the cell.
    All that is known of it is told by the cell, and asking is a call of the session: it waits until
    the session's running call ends.  Raises SessionLost if the session is gone, or its program has
    lost the process.
    """

    def __init__(self, cell: "ProcessesOfCell", report: _ProcessReport) -> None:
        self.id, self.pid, self.command = report.id, report.pid, report.argv
        self._cell = cell
        self._report = report

    def __repr__(self) -> str:
        code = self._report.exit_code
        state = "runs, as of the last call" if code is None else f"exit code {code}"
        return f"<BackgroundProcess {self.id}: {' '.join(self.command)[:80]!a}, {state}>"

    @property
    def exit_code(self) -> int | None:
        """Its exit code, as `run` has it; None while it runs."""
        if self._report.exit_code is None:
            self._report = self._cell.report(self.id)
        return self._report.exit_code

    @property
    def dropped_bytes(self) -> int:
        """How much of its output was dropped, as of the last call, because nobody had read it."""
        return self._report.dropped

    def read(self, max_bytes: int = 65536, timeout: float = 0.0) -> bytes:
        """Return output that was not read yet, of both streams; b"" if there is none after `timeout`
        seconds.

        The cell keeps the last `limits.output_bytes` of what was not read, and the process never waits.
        """
        deadline = time.monotonic() + _checked_seconds(timeout)
        size = min(_checked_size(max_bytes), self._cell.most_read)
        while True:
            left = max(0.0, deadline - time.monotonic())
            data: bytes = self._ask(bytes, "read", size, min(left, _TURN_SECONDS))
            if data or left <= _TURN_SECONDS or self.exit_code is not None:
                return data

    def write(self, data: str | bytes, timeout: float = 10.0) -> int:
        """Write to its standard input; return how many bytes it took within `timeout` seconds, which is
        less than all if it does not read, and 0 if it has closed it."""
        content, written = as_bytes("data", data), 0
        deadline = time.monotonic() + _checked_seconds(timeout)
        while written < len(content):
            left = max(0.0, deadline - time.monotonic())
            part = base64.b64encode(content[written : written + _WRITE_BYTES]).decode()
            taken = self._ask(int, "write", part, min(left, _TURN_SECONDS))
            written += max(0, taken)
            if taken <= 0 and (left <= _TURN_SECONDS or self.exit_code is not None):
                break
        return written

    def close_stdin(self) -> None:
        """Close its standard input."""
        self._ask(None, "close_stdin")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code; raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + _checked_seconds(timeout)
        while self.exit_code is None:
            left = _TURN_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"wait: the process still runs after {timeout:g} s")
            self._ask(None, "wait", min(left, _TURN_SECONDS))
        return self.exit_code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to its process group; harmless if nothing of it runs.

        A process that left the group, as setsid(1) does, lives on until the session ends.
        """
        if not isinstance(number, int) or not 0 < number < signal.NSIG:
            raise PolicyError(f"number: must be that of a signal, got {number!r}")
        self._ask(None, "kill", int(number))

    def _ask(self, kind: Any, method: str, *arguments: object) -> Any:
        value, self._report = self._cell.ask(kind, self.id, method, *arguments)
        return value


class ProcessesOfCell:
    """The background processes of one session, asked for by calls of it."""

    def __init__(self, execute: _Execute, limits: Limits) -> None:
        self._execute = execute
        self._limits = limits
        self.most_read = max(1, min(_READ_BYTES, limits.value_bytes // 2))  # by one call

    def start(self, given: CommandArguments, terminal: str = "") -> BackgroundProcess:
        """Start a command; raises PolicyError for invalid arguments, or without subprocesses.

        `terminal`: the path of the terminal that it is to have in place of pipes.
        """
        env = check_environment(given.env)
        arguments = list(argv_of(given)), given.cwd, env, self._limits.output_bytes, terminal
        told = self._call(_ProcessReport, "start", *arguments, trace_id=given.trace_id)
        return BackgroundProcess(self, told)

    def all(self) -> tuple[BackgroundProcess, ...]:
        """Return those that run, and the last that ended."""
        told = self._call(tuple[_ProcessReport, ...], "reports")
        return tuple(BackgroundProcess(self, each) for each in told)

    def report(self, number: int) -> _ProcessReport:
        told: _ProcessReport = self._call(_ProcessReport, "report", number)
        return told

    def ask(
        self, kind: Any, number: int, method: str, *arguments: object
    ) -> tuple[Any, _ProcessReport]:
        value, report = self._call(tuple[kind, _ProcessReport], "ask", number, method, *arguments)
        return value, report

    def _call(self, kind: Any, name: str, *arguments: object, trace_id: str | None = None) -> Any:
        """Return what a function of the cell's module gave; believe nothing of it but its type."""
        loaded = _LOADED.format(name=_MODULE, text=_text())
        code = f"{loaded}.{name}(*{arguments!r})"
        result = self._execute(CallArguments(code=code, language=PYTHON, trace_id=trace_id))
        refuse_without_subprocesses("start_command", result)
        if not result.ok:
            raise SessionLost(f"background processes: {result.error or result.reason}")
        try:
            return msgspec.convert(result.value, kind)
        except msgspec.ValidationError as error:  # a program of the session took the place of ours
            raise SessionLost(
                f"background processes: the cell told another thing: {error}"
            ) from None


def _text() -> str:
    return Path(__file__).with_name("cell_processes.py").read_text()


def _checked_seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 1e9:
        raise PolicyError(f"timeout: must be seconds from 0 to 1e9, got {timeout!r}")
    return float(timeout)


def _checked_size(max_bytes: object) -> int:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise PolicyError(f"max_bytes: must be a whole number above 0, got {max_bytes!r}")
    return max_bytes

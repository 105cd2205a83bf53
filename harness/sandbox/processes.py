"""`BackgroundProcess`: a command of a session that goes on after the call that started it."""

import base64
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.policy import Limits
from ...runner.result import SandboxResult
from .cell_modules import code_calling, value_told
from .commands import argv_of, refuse_without_subprocesses
from .parameters import CallArguments, CommandArguments
from .request import as_bytes, check_environment

_READ_BYTES = 256 * 1024  # at most in one call, whatever is asked for
_WRITE_BYTES = 256 * 1024
_TURN_SECONDS = 1.0  # of a wait in the cell; then other calls of the session get their turn
_MODULE = Path(__file__).with_name("cell_processes.py")


class ProcessReport(NamedTuple):
    """The cell's word on a process, which is believed about nothing but the process."""

    id: int
    pid: int
    argv: tuple[str, ...]
    exit_code: int | None
    dropped: int = 0


_T = TypeVar("_T")
_Execute = Callable[[CallArguments], SandboxResult]


class BackgroundProcess:
    """A background command of a session.  Made by `Session.start_command`; safe from many threads.

    `id`: its number in the session.  `command`: the program and its arguments.  `pid`: in the cell.
    All that is known of it is told by the cell, and asking is a call of the session: it waits until
    the session's running call ends.  Raises SessionLost if the session is gone, or its program has
    lost the process.
    """

    def __init__(self, cell: "ProcessesOfCell", report: ProcessReport) -> None:
        self.id, self.pid, self.command = report.id, report.pid, report.argv
        self._cell = cell
        self.report = report
        self._returned = b""  # what a cancelled task had read

    def __repr__(self) -> str:
        code = self.report.exit_code
        state = "runs, as of the last call" if code is None else f"exit code {code}"
        return f"<BackgroundProcess {self.id}: {' '.join(self.command)[:80]!a}, {state}>"

    @property
    def exit_code(self) -> int | None:
        """Its exit code, as `run` has it; None while it runs."""
        if self.report.exit_code is None:
            self.report = self._cell.report(self.id)
        return self.report.exit_code

    @property
    def dropped_bytes(self) -> int:
        """How much of its output was dropped, as of the last call, because nobody had read it."""
        return self.report.dropped

    def read(self, max_bytes: int = 65536, timeout: float = 0.0) -> bytes:
        """Return output that was not read yet, of both streams; b"" if there is none after `timeout`
        seconds.

        The cell keeps the last `limits.output_bytes` of what was not read, and the process never waits.
        """
        return self._read(max_bytes, _Patience(timeout))

    async def aread(self, max_bytes: int = 65536, timeout: float = 0.0) -> bytes:
        """`read` for asyncio; what a cancelled task had read is returned by the next read."""
        patience = _Patience(timeout)
        return await patience.in_thread(lambda: self._read(max_bytes, patience), self._put_back)

    def _read(self, max_bytes: int, patience: "_Patience") -> bytes:
        size = min(_checked_size(max_bytes), self._cell.most_read)
        while True:
            if self._returned:  # also by a task that is being cancelled meanwhile
                returned, self._returned = self._returned[:size], self._returned[size:]
                return returned
            seconds, is_last = patience.turn()
            data: bytes = self._ask(bytes, "read", size, seconds)
            if data or is_last or self.exit_code is not None:
                return data

    def _put_back(self, data: bytes) -> None:
        self._returned += data

    def write(self, data: str | bytes, timeout: float = 10.0) -> int:
        """Write to its standard input; return how many bytes it took within `timeout` seconds, which is
        less than all if it does not read, and 0 if it has closed it."""
        return self._write(as_bytes("data", data), _Patience(timeout))

    async def awrite(self, data: str | bytes, timeout: float = 10.0) -> int:
        """`write` for asyncio; a task that is cancelled may have written a part."""
        content, patience = as_bytes("data", data), _Patience(timeout)
        return await patience.in_thread(lambda: self._write(content, patience))

    def _write(self, content: bytes, patience: "_Patience") -> int:
        written = 0
        while written < len(content):
            seconds, is_last = patience.turn()
            part = base64.b64encode(content[written : written + _WRITE_BYTES]).decode()
            taken = self._ask(int, "write", part, seconds)
            written += max(0, taken)
            if patience.is_over or (taken <= 0 and (is_last or self.exit_code is not None)):
                break
        return written

    def close_stdin(self) -> None:
        """Close its standard input."""
        self._ask(None, "close_stdin")

    async def aclose_stdin(self) -> None:
        """`close_stdin` for asyncio."""
        await _Patience(None).in_thread(self.close_stdin)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code; raises TimeoutError after `timeout` seconds."""
        return self._wait(_Patience(timeout))

    async def await_end(self, timeout: float | None = None) -> int:
        """`wait` for asyncio."""
        patience = _Patience(timeout)
        return await patience.in_thread(lambda: self._wait(patience))

    def _wait(self, patience: "_Patience") -> int:
        is_last = False
        while self.exit_code is None:
            if is_last:
                raise TimeoutError(f"wait: the process still runs after {patience.timeout:g} s")
            seconds, is_last = patience.turn()
            self._ask(None, "wait", seconds)
        return self.exit_code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to its process group; harmless if nothing of it runs.

        A process that left the group, as setsid(1) does, lives on until the session ends.
        """
        if not isinstance(number, int) or not 0 < number < signal.NSIG:
            raise PolicyError(f"number: must be that of a signal, got {number!r}")
        self._ask(None, "kill", int(number))

    async def akill(self, number: int = signal.SIGKILL) -> None:
        """`kill` for asyncio."""
        await _Patience(None).in_thread(lambda: self.kill(number))

    def _ask(self, kind: Any, method: str, *arguments: object) -> Any:
        value, self.report = self._cell.ask(kind, self.id, method, *arguments)
        return value


class _Patience:
    """How long a method waits, in turns: between two of them other calls of the session run."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else _checked_seconds(timeout)
        self.is_over = False  # the task that waits was cancelled
        self._deadline = time.monotonic() + self.timeout

    def turn(self) -> tuple[float, bool]:
        """Return the seconds of the next turn, and whether it is the last."""
        left = 0.0 if self.is_over else max(0.0, self._deadline - time.monotonic())
        return min(left, _TURN_SECONDS), left <= _TURN_SECONDS

    async def in_thread(
        self, work: Callable[[], _T], discard: Callable[[_T], None] | None = None
    ) -> _T:
        """Call `work` in a thread; if the task is cancelled, it ends after its turn, and `discard` is
        called with its result."""
        from .run import in_thread  # asyncio takes 40 ms to import

        try:
            return await in_thread(work, discard)
        except BaseException:
            self.is_over = True
            raise


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
        env, argv = check_environment(given.env), argv_of(given)
        arguments = list(argv), given.cwd, env, self._limits.output_bytes, terminal
        try:
            told = self._call(ProcessReport, "start", *arguments, trace_id=given.trace_id)
        except PolicyError:
            self._call(None, "forget_unstarted")
            raise
        process = BackgroundProcess(self, told)
        process.command = argv
        return process

    def all(self) -> tuple[BackgroundProcess, ...]:
        """Return those that run, and the last that ended."""
        told = self._call(tuple[ProcessReport, ...], "reports")
        return tuple(BackgroundProcess(self, each) for each in told)

    def report(self, number: int) -> ProcessReport:
        told: ProcessReport = self._call(ProcessReport, "report", number)
        return told

    def ask(
        self, kind: Any, number: int, method: str, *arguments: object
    ) -> tuple[Any, ProcessReport]:
        value, report = self._call(tuple[kind, ProcessReport], "ask", number, method, *arguments)
        return value, report

    def _call(self, kind: Any, name: str, *arguments: object, trace_id: str | None = None) -> Any:
        """Return what a function of the cell's module gave; believe nothing of it but its type."""
        code = code_calling(_MODULE, name, *arguments)
        result = self._execute(CallArguments(code=code, language=PYTHON, trace_id=trace_id))
        refuse_without_subprocesses("start_command", result)
        return value_told(kind, result, "background processes")


def _checked_seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 1e9:
        raise PolicyError(f"timeout: must be seconds from 0 to 1e9, got {timeout!r}")
    return float(timeout)


def _checked_size(max_bytes: object) -> int:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise PolicyError(f"max_bytes: must be a whole number above 0, got {max_bytes!r}")
    return max_bytes

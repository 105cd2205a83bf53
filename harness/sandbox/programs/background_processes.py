"""`BackgroundProcess`: a command of a session that goes on after the call that started it.

Modules of cellwright whose functions run in the cell of a Python session.

Their text is executed in the cell, as part of the session's program: it imports no module of
cellwright, and the program could change all of it. So the host trusts nothing in its answers but their
type.
"""

import base64
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ....policies.errors import PolicyError, SessionLost
from ....policies.languages import PYTHON
from ....policies.policy import Limits
from ....runner.requests.result import SandboxResult, SandboxStatus
from ..calls.call_request import as_bytes, check_environment
from ..calls.session_commands import argv_of, refuse_without_subprocesses
from ..checks import check_whole
from ..parameters import CallArguments, CommandArguments

_READ_BYTES = 256 * 1024  # largest read of one call
_WRITE_BYTES = 256 * 1024
_TURN_SECONDS = 1.0  # longest wait in the cell before other calls of the session get their turn
CELL_MODULE = Path(__file__).with_name("cell_processes.py")


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

    `id`: its number in the session. `command`: the program and its arguments. `pid`: in the cell. The
    cell reports everything that is known about it. Asking is a call of the session, so it waits until
    the session's running call ends. Raises SessionLost if the session is gone, or its program has lost
    the process.
    """

    def __init__(self, cell: "ProcessesOfCell", report: ProcessReport) -> None:
        self.id, self.pid, self.command = report.id, report.pid, report.argv
        self._cell = cell
        self.report = report
        self._returned = b""  # data that a cancelled task had read

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
        """How many unread bytes of its output were dropped, as of the last call."""
        return self.report.dropped

    def read(self, max_bytes: int = 65536, timeout: float = 0.0) -> bytes:
        """Return output that was not read yet, of both streams; b"" if there is none after `timeout`
        seconds.

        The cell keeps the last `limits.output_bytes` of unread output, and the process never waits.
        """
        return self._read(max_bytes, _Patience(timeout))

    async def aread(self, max_bytes: int = 65536, timeout: float = 0.0) -> bytes:
        """`read` for asyncio; the next read returns the data that a cancelled task had read."""
        patience = _Patience(timeout)
        return await patience.in_thread(lambda: self._read(max_bytes, patience), self._put_back)

    def _read(self, max_bytes: int, patience: "_Patience") -> bytes:
        size = min(check_whole("max_bytes", max_bytes), self._cell.most_read)
        while True:
            if self._returned:  # a task that is being cancelled may have left data
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
        from ..calls.background import in_thread  # asyncio takes 40 ms to import

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
        """Return the running commands, and the last ones that ended."""
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
        """Return the answer of a function of the cell's module; trust nothing in it but its type."""
        code = code_calling(CELL_MODULE, name, *arguments)
        result = self._execute(CallArguments(code=code, language=PYTHON, trace_id=trace_id))
        refuse_without_subprocesses("start_command", result)
        return value_told(kind, result, "background processes")


def _checked_seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 1e9:
        raise PolicyError(f"timeout: must be seconds from 0 to 1e9, got {timeout!r}")
    return float(timeout)


# An expression, so that no name stays in the session; the module is stored where programs do not look.
_LOADED = (
    "(__import__('sys').modules.get({name!r}) or (lambda module: (exec({text!r}, module.__dict__), "
    "__import__('sys').modules.setdefault({name!r}, module))[1])"
    "(__import__('types').ModuleType({name!r})))"
)  # fmt: skip


def code_calling(module: Path, function: str, *arguments: object) -> str:
    """Return the code that calls a function of the module in this file, which the cell loads once."""
    loaded = _LOADED.format(name=f"_cellwright_{module.stem}", text=module.read_text())
    return f"{loaded}.{function}(*{arguments!r})"


def value_told(kind: Any, result: SandboxResult, what: str) -> Any:
    """Return what such a function gave, as a `kind`; `what` names the work in error messages.

    Raises SessionLost if it failed, or gave another kind of value; PolicyError if the policy's source
    checks refuse our code.
    """
    if result.status is SandboxStatus.REJECTED:
        raise PolicyError(
            f"{what}: refused by the policy's source checks: {result.error}",
            "use a policy whose validation.mode is not enforce",
        )
    if not result.ok:
        raise SessionLost(f"{what}: {result.error or result.reason}")
    try:
        return msgspec.convert(result.value, kind)
    except (
        msgspec.ValidationError
    ) as error:  # a program of the session replaced cellwright's function
        raise SessionLost(f"{what}: the cell told another thing: {error}") from None

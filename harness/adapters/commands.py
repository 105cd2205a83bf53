"""Commands of an adapter: in the background of a session, with output that is complete."""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from ...policies.errors import CellwrightError, PolicyError
from ..sandbox.commands import argv_of
from ..sandbox.parameters import CommandArguments
from ..sandbox.processes import BackgroundProcess
from ..sandbox.request import as_bytes
from ..sandbox.session import Session
from .files import CellFiles

_TIMED_OUT = 124  # timeout(1)
_FIRST_TURN, _LONGEST_TURN = 0.05, 1.0  # seconds; between two turns other calls of the session run
# $0 is the path of its files.  The shell is replaced, and says 127 or 126 if that fails.
_LINE = 'exec "$@" <{stdin} >"$0.out" 2>{stderr}'


class CommandOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and the beginning of its output.

    exit_code: as `CommandResult` has it; 124 if it took too long
    stdout, stderr: the bytes that it wrote, at most as many as were asked for
    sizes: how many bytes it wrote to the two streams
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    sizes: tuple[int, int] = (0, 0)
    timed_out: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether it wrote more to a stream than is here."""
        return self.sizes[0] > len(self.stdout) or self.sizes[1] > len(self.stderr)

    @property
    def text(self) -> tuple[str, str]:
        """Both streams as text, with U+FFFD for bytes that are not UTF-8."""
        return self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace")


class CapturedCommand:
    """One command, whose output goes to files in /tmp of the cell until it has ended."""

    def __init__(
        self,
        given: CommandArguments,
        session: Callable[[], Session],
        files: CellFiles,
        *,
        is_merged: bool,
        max_output_bytes: int,
    ) -> None:
        if given.timeout is not None and not 0 < given.timeout < math.inf:
            raise PolicyError(f"timeout: must be > 0 and finite, got {given.timeout!r}")
        self._given, self._session, self._files = given, session, files
        self._argv = argv_of(given)
        self._stdin = None if given.stdin is None else as_bytes("stdin", given.stdin)
        self._is_merged, self._max_output_bytes = is_merged, max_output_bytes
        self._path = f"/tmp/.cellwright-{secrets.token_hex(8)}"  # noqa: S108 - of the cell
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Have `run` kill the command; it does so within a second."""
        self._cancelled.set()

    def run(self, wall_seconds: float) -> CommandOutput:
        """Run it to its end, or for at most `wall_seconds`, and return its output."""
        process = self._started()
        try:
            timed_out = not self._wait(process, min(wall_seconds, self._given.timeout or math.inf))
        except BaseException:
            self._kill(process)
            raise
        if timed_out:
            process.kill()
        code = process.wait(_LONGEST_TURN * 10)
        return self._output(process, _TIMED_OUT if timed_out else code, timed_out=timed_out)

    def _started(self) -> BackgroundProcess:
        stdin = "/dev/null"
        if self._stdin is not None:
            self._files.write(f"{self._path}.in", self._stdin)
            stdin = '"$0.in"'
        line = _LINE.format(stdin=stdin, stderr="&1" if self._is_merged else '"$0.err"')
        argv = ["/bin/sh", "-c", line, self._path, *self._argv]
        return self._session().start_command(argv, cwd=self._given.cwd, env=self._given.env)

    def _wait(self, process: BackgroundProcess, timeout: float) -> bool:
        """Wait for its end; return whether it came in time."""
        deadline = time.monotonic() + timeout
        turn = _FIRST_TURN
        while not self._cancelled.is_set():
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                process.wait(min(turn, left))
                return True
            if left <= turn:
                return False
            turn = min(2 * turn, _LONGEST_TURN)
        return False

    def _kill(self, process: BackgroundProcess) -> None:
        with contextlib.suppress(CellwrightError, TimeoutError):
            process.kill()
            self._output(process, 0)

    def _output(
        self, process: BackgroundProcess, exit_code: int, *, timed_out: bool = False
    ) -> CommandOutput:
        if self._stdin is not None:
            self._files.remove(f"{self._path}.in")
        paths = (f"{self._path}.out", f"{self._path}.err")
        (stdout, written), (stderr, errors) = self._files.take(paths, self._max_output_bytes)
        if written < 0:  # the shell was not started, and its pipe says why
            stderr = process.read()
            errors = len(stderr)
            if self._is_merged:
                stdout, stderr, written, errors = stderr, b"", errors, 0
        return CommandOutput(
            exit_code=exit_code, stdout=stdout, stderr=stderr,
            sizes=(max(0, written), max(0, errors)), timed_out=timed_out,
        )  # fmt: skip

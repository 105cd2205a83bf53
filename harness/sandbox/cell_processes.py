"""The background processes of a session, as its cell keeps them.

The text of this module is executed in the cell, as part of the session's program (`processes.py`): it
imports nothing of ours, and the program could change all of it.  So the host believes none of it.
"""

import base64
import contextlib
import os
import select
import signal
import subprocess
import threading
from typing import Any

_CHUNK = 65536
_MOST_KNOWN = 64  # then those that ended first are forgotten
_TOLD_CHARACTERS = 1000  # of the arguments of each
_KNOWN: dict[int, "KeptProcess"] = {}
_STARTED = [0]


class KeptProcess:
    """One process with its output: the last bytes of it that nobody has read.

    A process with a terminal has its input and output there.
    """

    def __init__(
        self, argv: list[str], cwd: str | None, env: dict[str, str], kept: int, terminal: str = ""
    ) -> None:
        self.argv = _beginning(argv)
        self.pid = 0
        self.dropped = 0
        self._kept = kept
        self._unread = bytearray()
        self._changed = threading.Condition()
        self._has_ended = False  # its output
        self._code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        start = _start_at_terminal if terminal else _start_with_pipes
        try:
            self._process = process = start(argv, cwd, {**os.environ, **env}, terminal)
        except OSError as error:
            missing = cwd if cwd and error.filename == cwd else argv[0]
            self._tell(f"{missing}: {error.strerror}\n", terminal)
            self._has_ended, self._code = True, 127 if error.errno == 2 else 126
            return
        self.pid = process.pid
        if terminal:
            self._has_ended = True
            return
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        try:
            threading.Thread(target=self._keep_output, daemon=True).start()
        except BaseException:
            self.kill(signal.SIGKILL)
            raise

    def _tell(self, message: str, terminal: str) -> None:
        """Have the reader of the output read `message`."""
        data = message.encode(errors="replace")
        if terminal:
            with (
                contextlib.suppress(OSError),
                open(terminal, "wb", opener=_without_control) as file,
            ):
                file.write(data)
        else:
            self._unread += data

    def _keep_output(self) -> None:
        """Take what it writes, so that it never waits for a reader, and keep the end of it."""
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        while data := os.read(pipe, _CHUNK):
            with self._changed:
                self._unread += data
                if (beyond := len(self._unread) - self._kept) > 0:
                    del self._unread[:beyond]
                    self.dropped += beyond
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def code(self) -> int | None:
        """Return its exit code as a shell has it; None while it runs."""
        if self._process and self._code is None and (code := self._process.poll()) is not None:
            self._code = code if code >= 0 else 128 - code
        return self._code

    def read(self, size: int, seconds: float) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._has_ended, seconds)
            data = bytes(self._unread[:size])
            del self._unread[:size]
        return base64.b64encode(data).decode()

    def write(self, data: str, seconds: float) -> int:
        """Write as much as it takes in that time; return how many bytes."""
        content, pipe = base64.b64decode(data), self._process and self._process.stdin
        written = 0
        try:
            while pipe and written < len(content) and select.select([], [pipe], [], seconds)[1]:
                written += os.write(pipe.fileno(), content[written : written + 4096])
        except (BrokenPipeError, ValueError):  # it has closed it, or we have
            pass
        return written

    def close_stdin(self) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        if self._process and self.code() is None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return

    def kill(self, number: int) -> None:
        """Send a signal to its process group, whose other processes may outlive it."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _beginning(argv: list[str]) -> list[str]:
    """Return the first arguments, as far as they are told: all of them may be longer than a value, and
    bytes that are no UTF-8 would not be one."""
    told: list[str] = []
    left = _TOLD_CHARACTERS
    for each in argv:
        if left <= 0:
            break
        told.append(each[:left].encode(errors="replace").decode())
        left -= max(1, len(each))
    return told


def _start_with_pipes(
    argv: list[str], cwd: str | None, env: dict[str, str], _: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, bufsize=0, start_new_session=True,
    )  # fmt: skip


def _without_control(path: str, flags: int) -> int:
    """Open a terminal, but not as the controlling one of this process."""
    return os.open(path, flags | os.O_NOCTTY)


def _start_at_terminal(
    argv: list[str], cwd: str | None, env: dict[str, str], terminal: str
) -> subprocess.Popen[bytes]:
    """Start a process whose controlling terminal is `terminal`: the first that a new session opens."""
    opened = _without_control(terminal, os.O_RDWR)
    try:
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=opened, stdout=opened, stderr=opened,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(terminal, os.O_RDWR)),  # noqa: PLW1509 - takes no lock
        )  # fmt: skip
    finally:
        os.close(opened)


def start(
    argv: list[str], cwd: str | None, env: dict[str, str], kept: int, terminal: str = ""
) -> list[Any]:
    """Start a process and return what `report` does."""
    while len(_KNOWN) >= _MOST_KNOWN:
        ended = next((n for n, each in _KNOWN.items() if each.code() is not None), 0)
        if not ended:
            raise RuntimeError(f"{_MOST_KNOWN} background processes run")
        del _KNOWN[ended]
    process = KeptProcess(argv, cwd, env, kept, terminal)
    _STARTED[0] += 1
    _KNOWN[_STARTED[0]] = process
    return report(_STARTED[0])


def forget_unstarted() -> None:
    """Forget the last process if it could not be started."""
    if (last := _KNOWN.get(_STARTED[0])) and not last.pid:
        del _KNOWN[_STARTED[0]]


def report(number: int) -> list[Any]:
    """Return the number of a process, its pid, command, exit code and how much output was dropped."""
    process = _KNOWN[number]
    return [number, process.pid, process.argv, process.code(), process.dropped]


def reports() -> list[list[Any]]:
    return [report(number) for number in _KNOWN]


def ask(number: int, method: str, *arguments: Any) -> list[Any]:
    """Call a method of a process; return what it gave, and `report`."""
    return [getattr(_KNOWN[number], method)(*arguments), report(number)]

"""The background processes of a session, as its cell keeps them.

The text of this module is executed in the cell, as part of the session's program
(`background_processes.py`): it imports no module of cellwright, and the program could change all of
it. So the host believes none of it.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
from typing import Any

_CHUNK = 65536
_MOST_KNOWN = 64  # with more, the processes that ended first are forgotten
_TOLD_CHARACTERS = 1000  # characters of the arguments of each process
_KNOWN: dict[int, "KeptProcess"] = {}
_STARTED = [0]


class KeptProcess:
    """One process with the last unread bytes of its output.

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
        self._has_ended = False  # True once its output has ended
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
        """Read its output, so that it never waits for a reader, and keep the end."""
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
        except (BrokenPipeError, ValueError):  # the process or the supervisor has closed the pipe
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
    """Return the beginning of the arguments. All of them may be longer than a value, and undecodable
    bytes cannot be in one."""
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
    """Start a process whose controlling terminal is `terminal`."""
    opened = _without_control(terminal, os.O_RDWR)
    try:
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=opened, stdout=opened, stderr=opened,
            start_new_session=True,
            preexec_fn=lambda: _begin(terminal),  # noqa: PLW1509 - takes no lock
        )  # fmt: skip
    finally:
        os.close(opened)


def _begin(terminal: str = "") -> None:
    """Be a process whose controlling terminal is `terminal`, and which SIGINT ends: between two
    requests the session's program ignores it."""
    if terminal:
        os.close(os.open(terminal, os.O_RDWR))
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # where a guard has opened it, open(2) gives none
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
    """Call a method of a process; return its result, and `report`."""
    return [getattr(_KNOWN[number], method)(*arguments), report(number)]


# Commands that come with their streams (harness/sandbox/projects/open_cell.py).

_LENGTH, _STATUS = struct.Struct("!I"), struct.Struct("!i")
_STREAMS = 3


def serve(path: str) -> None:
    """Listen at `path` for commands; each runs beside the session's program, and beside the others."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    """Run the command of a connection: bytes that come are signals, its exit code is the answer, and
    the end of the connection kills what still runs of it.

    The client then sends the pipes that it has read: what runs in the background neither waits for
    a reader nor gets SIGPIPE.
    """
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, _STREAMS)
    with connection, connection.makefile("rb") as file:
        argv, cwd, env, terminal = json.loads(file.read(*_LENGTH.unpack(head)))
        try:
            process = _start_at_terminal(argv, cwd, env, terminal) if terminal else _started(
                argv, cwd, env, streams
            )  # fmt: skip
        except OSError as error:
            missing = cwd if error.filename == cwd else argv[0]
            message = f"{missing}: {error.strerror}\n".encode(errors="surrogateescape")
            _report(message, terminal, streams)
            connection.sendall(_STATUS.pack(127 if error.errno == 2 else 126))
            return
        finally:
            for each in streams:
                os.close(each)
        left: list[int] = []
        watching = threading.Thread(
            target=_pass_signals, args=(connection, process, left), daemon=True
        )
        watching.start()
        code = process.wait()
        with contextlib.suppress(OSError):  # the client has gone
            connection.sendall(_STATUS.pack(code if code >= 0 else 128 - code))
        watching.join()
    for each in left:
        threading.Thread(target=_drop, args=(each,), daemon=True).start()


def _started(
    argv: list[str], cwd: str, env: dict[str, str], streams: list[int]
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
        preexec_fn=_begin,  # noqa: PLW1509 - takes no lock
    )  # fmt: skip


def _report(message: bytes, terminal: str, streams: list[int]) -> None:
    with contextlib.suppress(OSError):
        if terminal:
            with open(terminal, "wb", opener=_without_control) as file:
                file.write(message)
        else:
            os.write(streams[2], message)


def _pass_signals(
    connection: socket.socket, process: subprocess.Popen[bytes], left: list[int]
) -> None:
    """Send the command the signals of its client; add the pipes that come to `left`."""
    numbers = b"-"
    while numbers:
        try:
            numbers, pipes, _, _ = socket.recv_fds(connection, 64, _STREAMS)
        except OSError:
            numbers, pipes = b"", []
        left += pipes
        for number in numbers or bytes([signal.SIGKILL]):
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)


def _drop(pipe: int) -> None:
    while os.read(pipe, _CHUNK):
        pass
    os.close(pipe)

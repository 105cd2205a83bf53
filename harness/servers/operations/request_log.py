"""`RequestLog`: one line of JSON for each request to a server, in a file or on stderr."""

import os
import select
import stat
import threading
import time

import msgspec

from ....policies.errors import PolicyError
from ....runner.audit.record import plain

STDERR = "-"
_TEXT_LIMIT = 128  # characters of a value that a client chose
_LINE_BYTES = 4096  # PIPE_BUF in pipe(7): a pipe that is ready takes so many without waiting

LogValue = str | int | float | None


class RequestLog:
    """Appends lines; safe from many threads, and never waits for a reader.

    A line that cannot be written at once is dropped; `dropped` of the next line counts them.
    The file is opened anew for each line that finds it moved away, so a tool may rotate it.
    """

    def __init__(self, path: str = STDERR) -> None:
        """Open the file, mode 0600; raises PolicyError."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = 2 if path == STDERR else _opened(path)
        self._dropped = 0

    def note(self, server: str, kind: str, outcome: str, seconds: float, **more: LogValue) -> None:
        """Append a line; `more` has what else is known of the request, and texts in it are escaped and
        cut."""
        fields: dict[str, LogValue] = {
            "time": round(time.time(), 6), "server": server, "request": kind, "outcome": outcome,
            "seconds": round(seconds, 6),
        }  # fmt: skip
        for name, value in more.items():
            fields[name] = plain(value, _TEXT_LIMIT) if isinstance(value, str) else value
        with self._lock:
            self._write(fields | ({"dropped": self._dropped} if self._dropped else {}))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._lock:
            if self._descriptor > 2:
                os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, fields: dict[str, LogValue]) -> None:
        line = msgspec.json.encode(fields) + b"\n"
        try:
            self._follow()
            ready = len(line) <= _LINE_BYTES and _takes(self._descriptor)
            if ready and os.write(self._descriptor, line) == len(line):
                self._dropped = 0
                return
        except (OSError, PolicyError):
            pass
        self._dropped += 1

    def _follow(self) -> None:
        """Open the file of that name again if another one, or none, has its place."""
        if self._descriptor <= 2:
            return
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            pass
        other = _opened(self._path)
        os.close(self._descriptor)
        self._descriptor = other


def _takes(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def _opened(path: str) -> int:
    """Open a regular file for appending; a FIFO without a reader would block, or end, the server."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise PolicyError(f"--request-log: cannot open {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PolicyError(f"--request-log: {path} is not a regular file")
    return descriptor

"""`Terminal`: a program of a session at a terminal of the cell's own, whose master the host has."""

import contextlib
import errno
import os
import select
import time
import weakref
from collections.abc import Callable
from typing import Self

from ...policies.errors import ClosedError, PolicyError
from ...runner.terminal import resize
from .processes import BackgroundProcess
from .request import as_bytes

SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_MOST = 65535  # rows, and columns: unsigned short in ioctl_tty(2)
_WRITE_SECONDS = 30.0  # for a program that does not read


class Terminal:
    """A program at a terminal.  Made by `Session.terminal`; a context manager.

    The program's output is passed on unchanged: it may hold escape sequences that change a terminal, or
    make it send text.  A Terminal that is garbage-collected is closed.
    """

    def __init__(
        self, master: int, process: BackgroundProcess, on_close: Callable[[], None]
    ) -> None:
        self._master = master
        self._process = process
        self._finalizer = weakref.finalize(self, _close, master, on_close)

    @property
    def pid(self) -> int:
        """The number of the program in the cell."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor of the master, which does not block, for poll(2)."""
        if not self._finalizer.alive:
            raise ClosedError("the terminal was closed")
        return self._master

    def read(self, max_bytes: int = 65536, timeout: float | None = None) -> bytes:
        """Return some output, waiting for it; b"" once the program and all others at the terminal have
        ended.  Raises TimeoutError after `timeout` seconds."""
        if not self._wait(select.POLLIN, timeout):
            raise TimeoutError(f"read: no output after {timeout:g} s")
        try:
            return os.read(self.fileno(), max_bytes)
        except BlockingIOError:  # another thread was faster
            return self.read(max_bytes, timeout)
        except OSError as error:
            if error.errno == errno.EIO:  # nobody has the other end open (pty(7))
                return b""
            raise

    def write(self, data: str | bytes, timeout: float = _WRITE_SECONDS) -> None:
        """Type `data`; raises TimeoutError if the program does not read it in `timeout` seconds."""
        content = as_bytes("data", data)
        deadline = time.monotonic() + timeout
        while content:
            if not self._wait(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"write: the program does not read, after {timeout:g} s")
            with contextlib.suppress(BlockingIOError):
                content = content[os.write(self.fileno(), content) :]

    def resize(self, rows: int, columns: int) -> None:
        """Set the size; programs in the foreground get SIGWINCH."""
        resize(self.fileno(), *check_size(rows, columns))

    @property
    def exit_code(self) -> int | None:
        """The exit code of the program, as `run` has it; None while it runs."""
        return self._process.exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program's end and return its exit code; raises TimeoutError, SessionLost."""
        return self._process.wait(timeout)

    def kill(self, number: int = 9) -> None:
        """Send a signal to the program and its process group."""
        self._process.kill(number)

    def close(self) -> None:
        """Hang up: the programs at the terminal get SIGHUP (pty(7)).  Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, event: int, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), event)
        return bool(poll.poll(None if timeout is None else timeout * 1000))


def _close(master: int, on_close: Callable[[], None]) -> None:
    os.close(master)
    on_close()


def check_size(rows: object, columns: object) -> tuple[int, int]:
    """Return the size; raises PolicyError for an invalid one."""
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise PolicyError(f"{name}: must be a whole number from 1 to {_MOST}, got {value!r}")
    assert isinstance(rows, int)  # noqa: S101 - for the type checker
    assert isinstance(columns, int)  # noqa: S101
    return rows, columns

"""`Terminal`: a program of a session at a terminal of the cell's own, whose master the host has."""

import contextlib
import errno
import os
import select
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....policies.closing import Closing
from ....policies.errors import ClosedError, LaunchError
from ....runner.cells.cell_network import resize
from ....runner.concurrency import begin_thread
from ..calls.call_request import as_bytes, check_environment, check_size
from ..calls.executing import AsyncClosing, in_asyncio
from ..parameters import CommandArguments, TerminalArguments
from .background_processes import BackgroundProcess, ProcessReport

if TYPE_CHECKING:
    from asyncio import Future

_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_WRITE_SECONDS = 30.0  # time for a program that does not read


class Terminal(AsyncClosing):
    """A program at a terminal.  Made by `Session.terminal`; a context manager.

    The program's output is passed on unchanged: it may hold escape sequences that change a terminal, or
    make it send text.  A Terminal that is garbage-collected is closed.
    """

    def __init__(
        self, master: int, process: BackgroundProcess, on_close: Callable[[], None]
    ) -> None:
        self._master = master
        self._process = process
        self._on_close = [on_close]
        self._awaited: dict[int, Future[None]] = {}
        self._finalizer = weakref.finalize(self, _close_forgotten, master, self._on_close)

    def ends_with(self, session: Closing) -> None:
        """Have closing the terminal close a session, too."""
        self._on_close.append(session.close)

    @property
    def report(self) -> ProcessReport:
        """The cell's last report of the program."""
        return self._process.report

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
        data = self._read(max_bytes)  # None: another thread was faster
        return self.read(max_bytes, timeout) if data is None else data

    async def aread(self, max_bytes: int = 65536, timeout: float | None = None) -> bytes:
        """`read` for asyncio, by one task at a time; cancelling the task loses no output."""
        while (data := self._read(max_bytes)) is None:
            if not await self._is_ready(select.POLLIN, timeout):
                raise TimeoutError(f"read: no output after {timeout:g} s")
        return data

    def _read(self, max_bytes: int) -> bytes | None:
        """Return output that is there, b"" at its end, else None."""
        try:
            return os.read(self.fileno(), max_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:  # no process has the other end open (pty(7))
                return b""
            raise

    def write(self, data: str | bytes, timeout: float = _WRITE_SECONDS) -> None:
        """Type `data`; raises TimeoutError if the program does not read it in `timeout` seconds."""
        content = as_bytes("data", data)
        deadline = time.monotonic() + timeout
        while content := self._type(content):
            if not self._wait(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"write: the program does not read, after {timeout:g} s")

    async def awrite(self, data: str | bytes, timeout: float = _WRITE_SECONDS) -> None:
        """`write` for asyncio, by one task at a time; a cancelled one may have typed a part."""
        content = as_bytes("data", data)
        deadline = time.monotonic() + timeout
        while content := self._type(content):
            if not await self._is_ready(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"write: the program does not read, after {timeout:g} s")

    def _type(self, content: bytes) -> bytes:
        """Type as much as the terminal takes; return the rest."""
        with contextlib.suppress(BlockingIOError):
            return content[os.write(self.fileno(), content) :]
        return content

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

    async def await_end(self, timeout: float | None = None) -> int:
        """`wait` for asyncio."""
        return await self._process.await_end(timeout)

    def kill(self, number: int = 9) -> None:
        """Send a signal to the program and its process group."""
        self._process.kill(number)

    akill = in_asyncio(kill)

    def close(self) -> None:
        """Hang up: the programs at the terminal get SIGHUP (pty(7)).  Closing twice is fine."""
        if self._finalizer.detach():
            _close(self._master, self._on_close)

    def __repr__(self) -> str:
        state = repr(self._process).partition(": ")[2]
        return f"<Terminal {state}" if self._finalizer.alive else "<Terminal, closed>"

    def _wait(self, event: int, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), event)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    async def _is_ready(self, event: int, timeout: float | None) -> bool:
        import asyncio  # takes 40 ms to import

        loop, descriptor = asyncio.get_running_loop(), self.fileno()
        ready: Future[None] = loop.create_future()
        # A cancelled task that has not run since then must not stop this one.
        self._awaited[event] = ready
        is_read = event == select.POLLIN
        watch = loop.add_reader if is_read else loop.add_writer
        watch(descriptor, _resolve, ready)
        try:
            await asyncio.wait_for(ready, timeout)
        except TimeoutError:
            return False
        finally:
            if self._awaited.get(event) is ready:
                del self._awaited[event]
                (loop.remove_reader if is_read else loop.remove_writer)(descriptor)
        return True


def _close(master: int, on_close: list[Callable[[], None]]) -> None:
    os.close(master)
    _call(on_close)


def _close_forgotten(master: int, on_close: list[Callable[[], None]]) -> None:
    """Close in another thread: the one that collects garbage may hold a lock of the session."""
    os.close(master)
    with contextlib.suppress(LaunchError):  # no thread is left: the session ends when it is old
        begin_thread("cellwright-terminal", lambda: _call(on_close))


def _call(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def command_of(given: TerminalArguments) -> CommandArguments:
    """Return the command that runs at a terminal: by default a shell, with TERM=xterm."""
    return CommandArguments(
        command=_SHELL if given.command is None else given.command, cwd=given.cwd,
        user=given.user, env={"TERM": "xterm", **check_environment(given.env)}, trace_id=given.trace_id,
    )  # fmt: skip


def _resolve(future: "Future[None]") -> None:
    if not future.done():
        future.set_result(None)

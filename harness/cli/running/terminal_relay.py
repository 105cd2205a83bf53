"""The person's terminal and that of a cell, connected: what the person types and what programs show."""

import contextlib
import errno
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Protocol

from ....policies.errors import PolicyError
from ....runner.cells.cell_network import resize
from ...text.escape_sequences import TerminalFilter, TerminalQuestions

_INPUT, _OUTPUT = 0, 1
_STOP_BIT = 1 << (signal.SIGTSTP - 1)  # in the masks of proc(5): shells ignore it, editors catch it
_CHUNK = 65536
_SUSPEND = b"\x1a"  # Ctrl-Z
_LOOK_MS = 300
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_ANSWER_SECONDS = (
    1.0  # how long to wait for answers of the terminal before other programs read from it
)
_PUSH, _POP, _TITLE = b"\x1b[22;2t", b"\x1b[23;2t", b"\x1b]2;%b\x07"


def is_terminal() -> bool:
    """Tell whether standard input and output are a terminal."""
    return os.isatty(_INPUT) and os.isatty(_OUTPUT)


def _has_title() -> bool:
    """Tell whether the terminal takes titles: old consoles write them as text."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "linux")


def terminal_size() -> tuple[int, int]:
    """Return the rows and columns of the person's terminal."""
    columns, rows = os.get_terminal_size(_OUTPUT)
    return rows or 24, columns or 80


class Notices(Protocol):
    """Titles for the person's terminal, where they disturb no screen: when `fileno` is readable,
    `next_title` returns one, or None for the old one; it raises EOFError after the last one."""

    def fileno(self) -> int: ...

    def next_title(self) -> str | None: ...


class Job(Protocol):
    """The command that has the cell's terminal as its controlling one."""

    def send_signal(self, number: int) -> None: ...

    def number(self) -> int:
        """Return its process id on this host, 0 if it has ended."""


class TerminalRelay:
    """Carries bytes between the person's terminal and that of the cell."""

    def __init__(self, master: int, notices: Notices | None = None, job: Job | None = None) -> None:
        """`master` is that of the cell's terminal, and does not block."""
        self._master = master
        self._notices = notices
        self._job = job
        self._questions = TerminalQuestions()
        self._filter = TerminalFilter(self._questions)
        self._typed = b""

    def run(self) -> None:
        """Relay until the programs of the cell have ended, or the person's terminal has hung up.

        The person's terminal is restored on every way out but SIGKILL.
        """
        with signalled() as woken, _Keyboard(self._filter, self._await_answers) as keyboard:
            poll = select.poll()
            told = self._notices.fileno() if self._notices and _has_title() else -1
            for descriptor in (woken, self._master, told):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            while True:
                poll.register(_INPUT, select.POLLIN if len(self._typed) < _CHUNK else 0)
                poll.register(
                    self._master,
                    select.POLLIN | (select.POLLOUT if self._typed else 0),
                )
                ready = dict(poll.poll())
                if woken in ready:
                    numbers = os.read(woken, _CHUNK)
                    if signal.SIGTSTP in numbers:
                        self._suspend(keyboard)
                    elif (
                        signal.SIGCONT in numbers
                    ):  # the only sign of SIGSTOP, which none can catch
                        keyboard.take()
                    resize(self._master, *terminal_size())
                if told in ready and not self._tell(keyboard):
                    poll.unregister(told)
                if _INPUT in ready and not self._take():
                    return
                if _SUSPEND in self._typed and self._is_alone():
                    self._typed = self._typed.replace(_SUSPEND, b"")
                    self._suspend(keyboard)
                    continue
                if _INPUT in ready and self._has_stopped():
                    self._suspend(keyboard)
                event = ready.get(self._master, 0)
                if event & select.POLLOUT:
                    self._type()
                if event & ~select.POLLOUT and not self._show():
                    return

    def _is_alone(self) -> bool:
        """Tell whether Ctrl-Z would stop the command itself.  The kernel stops no program by that key
        whose parent is not of its session (POSIX: an orphaned process group), so this process does.
        The programs of a shell in the cell are that one's jobs."""
        if self._job is None:
            return False
        modes = termios.tcgetattr(self._master)
        is_key = modes[3] & termios.ISIG and modes[6][termios.VSUSP] == _SUSPEND
        return bool(is_key) and not any(
            int(self._told_of_command(each), 16) & _STOP_BIT for each in ("SigIgn", "SigCgt")
        )

    def _has_stopped(self) -> bool:
        """Tell whether the command has stopped itself by SIGSTOP, as agents do on a key of theirs: no
        other process would continue it."""
        return self._told_of_command("State")[0] == "T"

    def _told_of_command(self, name: str) -> str:
        """Return a line of /proc/PID/status (proc(5)) of the command while its process group has the
        terminal; else "ffff", which no state begins with and in which every signal is handled."""
        if self._job and os.tcgetpgrp(self._master) == (number := self._job.number()):
            with contextlib.suppress(OSError), open(f"/proc/{number}/status") as lines:
                for line in lines:
                    if line.startswith(f"{name}:"):
                        return line.split()[1]
        return "f" * 16

    def _suspend(self, keyboard: "_Keyboard") -> None:
        """Stop the command, then this process until its shell continues it.  Then the command goes on,
        in the background too, and paints its screen again, since its size seems to have changed."""
        if self._job:
            self._job.send_signal(signal.SIGSTOP)
        keyboard.stop()
        if self._job:
            self._job.send_signal(signal.SIGCONT)
        while os.tcgetpgrp(_INPUT) != os.getpgrp():  # nothing tells that `fg` has followed `bg`
            poll = select.poll()
            poll.register(self._master, select.POLLIN)
            if poll.poll(_LOOK_MS) and not self._show():
                return
        keyboard.take()
        rows, columns = terminal_size()
        resize(self._master, rows, max(1, columns - 1))
        resize(self._master, rows, columns)

    def _tell(self, keyboard: "_Keyboard") -> bool:
        """Show the next title; return whether there may be more.  It is written between sequences of
        programs, since the filter holds unfinished ones back."""
        assert self._notices  # noqa: S101 - its descriptor was ready
        try:
            keyboard.entitle(self._notices.next_title())
        except EOFError:
            return False
        return True

    def _take(self) -> bool:
        """Read the person's input; return whether the terminal is still there."""
        try:
            data = os.read(_INPUT, _CHUNK)
        except OSError:  # EIO: it has hung up
            return False
        self._questions.read(data)
        self._typed += data
        return bool(data)

    def _await_answers(self) -> None:
        """Take the answers to the questions of the guest: the next program would read them as typed."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        poll = select.poll()
        poll.register(_INPUT, select.POLLIN)
        while self._questions and (left := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * left) and not self._take():
                return

    def _type(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._typed = self._typed[os.write(self._master, self._typed) :]

    def _show(self) -> bool:
        try:
            data = os.read(self._master, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # EIO: no process has the other end open (pty(7))
            return False
        _write(self._filter.feed(data))
        return bool(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_OUTPUT, data) :]


class _Keyboard:
    """The person's terminal while each key goes to the cell.

    Others see it as it was before: the shell that gets it while this process is stopped, and the next
    program.
    """

    def __init__(self, passed: TerminalFilter, await_answers: Callable[[], None]) -> None:
        self._filter, self._await_answers = passed, await_answers
        self._has_own_title = False
        in_foreground(lambda: termios.tcdrain(_INPUT))  # the modes belong to the shell
        self._before = termios.tcgetattr(_INPUT)

    def __enter__(self) -> "_Keyboard":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and drop unread input."""
        with contextlib.suppress(OSError, termios.error):  # it has hung up
            self._await_answers()
            termios.tcsetattr(_INPUT, termios.TCSAFLUSH, self._before)
            _write(self._filter.restore())
            self.entitle(None)

    def entitle(self, title: str | None) -> None:
        """Show a title, or with None the one of before, which terminals keep on a stack (XTWINOPS)."""
        if title is not None:
            _write((b"" if self._has_own_title else _PUSH) + _TITLE % title.encode())
        elif self._has_own_title:
            _write(_TITLE % b"" + _POP)
        self._has_own_title = title is not None

    def take(self) -> None:
        in_foreground(lambda: tty.setraw(_INPUT, termios.TCSANOW))
        _write(self._filter.resume())

    def stop(self) -> None:
        """Stop this process, as the signal that was caught would have, with the terminal restored."""
        self.__exit__()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)


def in_foreground(do: Callable[[], object]) -> None:
    """Do something to the terminal; in the background the kernel stops this process (SIGTTOU) until its
    shell gives it the terminal, and refuses with EIO where no shell can (tcsetattr(3))."""
    while True:
        try:
            do()
        except termios.error as error:
            if error.args[0] == errno.EIO:
                raise PolicyError("the terminal belongs to other programs") from None
            if (
                error.args[0] != errno.EINTR
            ):  # interrupted by a handler when the process was continued
                raise
        else:
            return


@contextlib.contextmanager
def signalled() -> Iterator[int]:
    """Give a descriptor from which the numbers of signals can be read: that the size has changed, that
    this process is to stop, or goes on.  Signals that end this process end the `with` first."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    woken, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.signal(number, end) for number in _ENDING}
    for number in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT):
        before[number] = signal.signal(number, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(written)

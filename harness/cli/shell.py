"""`cellwright shell`: a shell, or another command, at a terminal in a cell."""

import argparse
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
from typing import NoReturn

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ..sandbox.terminal import Terminal
from ..text.escape_sequences import TerminalFilter, TerminalQuestions
from .options import AUDIT_HELP, add_backend, add_policy, add_skills
from .packages import add_packages, packages_of_calls
from .sandbox import add_connect, sandbox_of

_PROFILE = "workshop"
_INPUT, _OUTPUT = 0, 1
_CHUNK = 65536
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_ANSWER_SECONDS = 1.0  # for which answers of the terminal are waited for before others read from it
_NO_STATUS = {"timeout": None, "memory": None, "review": False}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="COMMAND",
        help="the program and its arguments; default a shell",
    )  # fmt: skip
    parser.add_argument(
        "--workspace",
        metavar="NAME",
        help="restore /workspace from this workspace, and save it after",
    )
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_connect(parser)
    add_backend(parser)
    add_policy(parser, default=_PROFILE)
    add_packages(parser)
    add_skills(parser, "show programs, below /skills,")
    parser.set_defaults(policy=_PROFILE, **_NO_STATUS)


def run(options: argparse.Namespace) -> int:
    if not (os.isatty(_INPUT) and os.isatty(_OUTPUT)):
        raise PolicyError(
            "shell: standard input and output must be a terminal",
            "cellwright run executes programs without one",
        )
    rows, columns = _size()
    environment = {"TERM": os.environ.get("TERM") or "xterm"}
    with (
        sandbox_of(options, PYTHON) as sandbox,
        sandbox.terminal(
            options.words or None, rows=rows, columns=columns, env=environment,
            workspace=options.workspace, packages=packages_of_calls(options),
        ) as terminal,
    ):  # fmt: skip
        _Relay(terminal).run()
        return terminal.wait()


def _size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(_OUTPUT)
    return rows or 24, columns or 80


class _Relay:
    """Carries bytes between the person's terminal and that of the cell."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._questions = TerminalQuestions()
        self._filter = TerminalFilter(self._questions)
        self._typed = b""

    def run(self) -> None:
        """Relay until the programs of the cell have ended, or the person's terminal has hung up.

        The person's terminal is restored on every way out but SIGKILL.
        """
        with _signals() as woken, _Keyboard(self._filter, self._await_answers) as keyboard:
            poll = select.poll()
            for descriptor in (woken, self._terminal.fileno()):
                poll.register(descriptor, select.POLLIN)
            while True:
                poll.register(_INPUT, select.POLLIN if len(self._typed) < _CHUNK else 0)
                poll.register(
                    self._terminal.fileno(),
                    select.POLLIN | (select.POLLOUT if self._typed else 0),
                )
                ready = dict(poll.poll())
                if woken in ready:
                    numbers = os.read(woken, _CHUNK)
                    if signal.SIGTSTP in numbers:
                        keyboard.stop()
                    elif signal.SIGCONT in numbers:  # after SIGSTOP, of which nobody is told
                        keyboard.take()
                    self._terminal.resize(*_size())
                if _INPUT in ready and not self._take():
                    return
                event = ready.get(self._terminal.fileno(), 0)
                if event & select.POLLOUT:
                    self._type()
                if event & ~select.POLLOUT and not self._show():
                    return

    def _take(self) -> bool:
        """Take what the person types; tell whether the terminal is still there."""
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
            self._typed = self._typed[os.write(self._terminal.fileno(), self._typed) :]

    def _show(self) -> bool:
        data = self._terminal.read(_CHUNK)
        _write(self._filter.feed(data))
        return bool(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_OUTPUT, data) :]


class _Keyboard:
    """The person's terminal while each key goes to the cell.

    Others see it as it was before: the shell that gets it while this process is stopped, which Ctrl-Z
    does not do, for that key goes to the cell too, but kill(1) and `fg` do; and the next program.
    """

    def __init__(self, passed: TerminalFilter, await_answers: Callable[[], None]) -> None:
        self._filter, self._await_answers = passed, await_answers
        _in_foreground(lambda: termios.tcdrain(_INPUT))  # the modes of a shell are not ours to keep
        self._before = termios.tcgetattr(_INPUT)

    def __enter__(self) -> "_Keyboard":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and drop what nobody has read."""
        with contextlib.suppress(OSError, termios.error):  # it has hung up
            self._await_answers()
            termios.tcsetattr(_INPUT, termios.TCSAFLUSH, self._before)
            _write(self._filter.restore())

    def take(self) -> None:
        _in_foreground(lambda: tty.setraw(_INPUT, termios.TCSANOW))

    def stop(self) -> None:
        """Stop this process, as the signal that was caught would have, with the terminal restored."""
        self.__exit__()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self.take()


def _in_foreground(do: Callable[[], object]) -> None:
    """Do something to the terminal; in the background the kernel stops this process (SIGTTOU) until its
    shell gives it the terminal, and refuses with EIO where no shell can (tcsetattr(3))."""
    while True:
        try:
            do()
        except termios.error as error:
            if error.args[0] == errno.EIO:
                raise PolicyError("shell: the terminal belongs to other programs") from None
            if error.args[0] != errno.EINTR:  # a handler of ours ran when it was continued
                raise
        else:
            return


@contextlib.contextmanager
def _signals() -> Iterator[int]:
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

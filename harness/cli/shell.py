"""`cellwright shell`: a shell, or another command, at a terminal in a cell."""

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ..sandbox.terminal import Terminal
from ..text.escape_sequences import TerminalFilter
from .options import AUDIT_HELP, add_policy, add_skills
from .packages import add_packages, packages_of_calls
from .sandbox import add_connect, sandbox_of

_PROFILE = "workshop"
_INPUT, _OUTPUT = 0, 1
_CHUNK = 65536
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
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
        self._filter = TerminalFilter()
        self._typed = b""

    def run(self) -> None:
        """Relay until the programs of the cell have ended, or the person's terminal has hung up.

        The person's terminal is restored on every way out but SIGKILL.
        """
        with _signals() as woken, _raw(self._filter):
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
                    os.read(woken, _CHUNK)
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
        self._typed += data
        return bool(data)

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


@contextlib.contextmanager
def _raw(passed: TerminalFilter) -> Iterator[None]:
    """Have each key go to the cell; afterwards restore the terminal and drop what nobody has read."""
    before = termios.tcgetattr(_INPUT)
    try:
        tty.setraw(_INPUT, termios.TCSANOW)
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):  # it has hung up
            termios.tcsetattr(_INPUT, termios.TCSAFLUSH, before)
            _write(passed.restore())


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Give a descriptor that is readable when the size changes, and have signals that end this process
    end the `with` first."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    woken, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.signal(number, end) for number in _ENDING}
    before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(written)

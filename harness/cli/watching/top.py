"""`cellwright top`: shows what runs, as it changes, until a key ends it."""

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.extras import how_to_install
from ....policies.policy import check_limit
from ...sandbox.remote.address import default_path
from ..options import SUCCEEDED
from ..options import seconds as seconds_of
from ..running.terminal_relay import in_foreground, is_terminal, signalled, terminal_size

if TYPE_CHECKING:  # rich is of an extra
    from rich.live import Live

    from .activity import Activity, ActivitySnapshot
    from .top_screen import TopScreen, TopView

_INPUT = 0
_DAEMON = ""  # --connect without a path
_SORT_KEYS = {"P": "cpu", "M": "memory", "T": "age", "N": "name"}  # as in top(1) and htop(1)
_PAGE = 10
_MOVES = {
    "\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1, "\x1b[5~": -_PAGE,
    "\x1b[6~": _PAGE, "\x1b[H": -1_000_000, "\x1b[1~": -1_000_000, "\x1bOH": -1_000_000,
}  # fmt: skip
_MOST_TYPED = 64
_KEY = re.compile(r"\x1b\[[0-?]*[@-~]|\x1bO.|.", re.DOTALL)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect", nargs="?", const=_DAEMON, metavar="PATH",
        help="also show the tenants of the daemon at this socket, without PATH that of your user: to "
        "its own user all of them, to others their own; default none",
    )  # fmt: skip
    parser.add_argument(
        "--audit", metavar="FILE",
        help="also show the refusals and connections that this audit trail tells; default none",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", help="print one screen with every line, for scripts"
    )
    parser.add_argument(
        "--interval", type=seconds_of, default=2.0, metavar="S",
        help="seconds from one look to the next; default %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--sort", choices=("cpu", "memory", "age", "idle", "state", "policy", "name"),
        default="cpu", help="the order of the list; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--filter", default="", metavar="TEXT", help="show only lines with this text; default all"
    )


def run(options: argparse.Namespace) -> int:
    """Show it until a key; raises PolicyError without the extra, or a terminal where it needs one."""
    check_limit("--interval", options.interval)
    try:
        from .activity import Activity
        from .top_screen import TopScreen, TopView
    except ModuleNotFoundError as error:
        what = f"the extra `top` is not installed: no package {error.name}"
        raise PolicyError(what, how_to_install("top")) from None
    if not options.once and (not is_terminal() or os.environ.get("TERM", "dumb") == "dumb"):
        raise PolicyError(
            "top: needs a terminal that can move its cursor", "with --once it prints one screen"
        )
    connect = os.fspath(default_path()) if options.connect == _DAEMON else options.connect
    view = TopView(sort=options.sort, wanted=options.filter, seconds=options.interval)
    with contextlib.closing(Activity(connect, options.audit)) as activity:
        screen = TopScreen(sys.stdout)
        if options.once:
            screen.whole(activity.look(), view)
        else:
            _Top(activity, screen, view).show()
    return SUCCEEDED


class _Top:
    """The loop: a thread looks, this one draws and takes keys, so that a source that does not answer
    delays no key."""

    def __init__(self, activity: "Activity", screen: "TopScreen", view: "TopView") -> None:
        self._activity, self._screen, self._view = activity, screen, view
        self._snapshot: ActivitySnapshot | None = None
        self._failure: Exception | None = None
        self._soon = threading.Event()  # look again now, or end
        self._ends = False
        self._looked, self._tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def show(self) -> None:
        from rich.live import Live

        thread = threading.Thread(target=self._look, name="cellwright-top", daemon=True)
        live = Live(
            console=self._screen.console, screen=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        with signalled() as woken, _Terminal(live) as terminal:
            thread.start()
            try:
                self._loop(woken, terminal)
            finally:
                self._ends = True
                self._soon.set()
        thread.join(5)  # it may wait for a daemon
        if self._failure:
            raise self._failure

    def _look(self) -> None:
        try:
            while not self._ends:
                self._soon.clear()
                self._snapshot = self._activity.look()
                os.write(self._tell, b"\0")
                self._soon.wait(self._view.seconds)
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self._failure = error
            os.write(self._tell, b"\0")

    def _loop(self, woken: int, terminal: "_Terminal") -> None:
        poll = select.poll()
        for each in (_INPUT, woken, self._looked):
            poll.register(each, select.POLLIN)
        while not self._failure:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if woken in ready:
                numbers = os.read(woken, 4096)
                if signal.SIGTSTP in numbers:
                    terminal.stop()
                elif signal.SIGCONT in numbers:  # after SIGSTOP, which no process can catch
                    terminal.take()
            if self._looked in ready:
                os.read(self._looked, 4096)
            if _INPUT in ready and not self._take(os.read(_INPUT, 4096)):
                return
            if self._snapshot:
                shown = self._screen.of(self._snapshot, self._view, *terminal_size())
                terminal.live.update(shown, refresh=True)

    def _take(self, typed: bytes) -> bool:
        """Take keys; tell whether the screen stays."""
        for key in _keys_of(typed.decode(errors="ignore")):
            if self._view.is_typing:
                self._type(key)
            elif self._view.shows_help:
                self._view = self._view._replace(shows_help=False)
            elif key in ("q", "\x04"):
                return False
            else:
                self._choose(key)
        return bool(typed)  # nothing: the terminal has hung up

    def _choose(self, key: str) -> None:
        from .top_screen import SORTS

        view = self._view
        if key in _SORT_KEYS:
            view = view._replace(sort=_SORT_KEYS[key], first=0)
        elif key in ("<", ">"):
            step = 1 if key == ">" else -1
            view = view._replace(sort=SORTS[(SORTS.index(view.sort) + step) % len(SORTS)], first=0)
        elif key == "r":
            view = view._replace(is_reversed=not view.is_reversed)
        elif key == "/":
            view = view._replace(is_typing=True, wanted="", first=0)
        elif key == "\x1b":
            view = view._replace(wanted="")
        elif key in ("h", "?"):
            view = view._replace(shows_help=True)
        elif key in _MOVES:
            rows = len(self._snapshot.cells) if self._snapshot else 0
            view = view._replace(first=max(0, min(view.first + _MOVES[key], rows - 1)))
        elif key == " ":
            self._soon.set()
        self._view = view

    def _type(self, key: str) -> None:
        view = self._view
        if key in ("\r", "\n"):
            view = view._replace(is_typing=False)
        elif key == "\x1b":
            view = view._replace(is_typing=False, wanted="")
        elif key in ("\x7f", "\b"):
            view = view._replace(wanted=view.wanted[:-1])
        elif key.isprintable() and len(view.wanted) < _MOST_TYPED:
            view = view._replace(wanted=view.wanted + key)
        self._view = view


def _keys_of(typed: str) -> list[str]:
    """Return the keys: characters, and control sequences (ECMA-48) whole."""
    return _KEY.findall(typed)


class _Terminal:
    """The person's terminal while keys are read one by one and the alternate screen is shown."""

    def __init__(self, live: "Live") -> None:
        self.live = live
        self._before = termios.tcgetattr(_INPUT)

    def __enter__(self) -> "_Terminal":
        self.take()
        return self

    def take(self) -> None:
        in_foreground(lambda: tty.setcbreak(_INPUT, termios.TCSANOW))
        self.live.stop()
        self.live.start()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, termios.error):  # it has hung up
            self.live.stop()
            termios.tcsetattr(_INPUT, termios.TCSAFLUSH, self._before)

    def stop(self) -> None:
        """Stop this process, with the terminal as it was, until it is continued."""
        self.__exit__()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self.take()

"""`ProgressLine`: a line on stderr while a command works for more than a second."""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .terminal import harmless

if TYPE_CHECKING:
    import threading

_PATIENCE_SECONDS, _TICK_SECONDS = 1.0, 0.25
_ERASE = "\r\x1b[K"  # to the beginning of the line, and erase to its end (ECMA-48, EL)
_COLUMNS = 80  # of a terminal that does not say its width


class ProgressLine:
    """Says on stderr what the command does, and for how long, once a second has passed.

    Only a terminal is told: a pipe or file gets nothing.  A terminal that cannot erase, TERM=dumb, gets
    one line.  Use it as a context manager around work that prints nothing, or that prints in `hidden`.
    At the end the line is erased.
    """

    def __init__(self, what: str) -> None:
        self._what = harmless(what)
        self._thread: threading.Thread | None = None
        self._is_drawn = False

    def __enter__(self) -> "ProgressLine":
        if sys.stderr is not None and sys.stderr.isatty():
            import threading  # only for a terminal

            self._ended, self._lock = threading.Event(), threading.Lock()
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._ended.set()
            self._thread.join()
            self._erase()

    def say(self, what: str) -> None:
        """Say from now on that the command does this."""
        self._what = harmless(what)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Show no line during a block, which can print."""
        if self._thread is None:
            yield
            return
        with self._lock:
            self._erase()
            yield

    def _draw(self) -> None:
        began = time.monotonic()
        is_dumb = os.environ.get("TERM") == "dumb"
        patience = _PATIENCE_SECONDS
        for turn in itertools.cycle("|/-\\"):
            if self._ended.wait(patience):
                return
            patience = _TICK_SECONDS
            with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal is gone
                if is_dumb:
                    sys.stderr.write(f"cellwright: {self._what} ...\n")
                    return
                self._is_drawn = True
                line = f"cellwright: {turn} {self._what} ({time.monotonic() - began:.0f} s)"
                sys.stderr.write(f"{_ERASE}{line[: _columns() - 1]}")
                sys.stderr.flush()

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(_ERASE)
                sys.stderr.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS

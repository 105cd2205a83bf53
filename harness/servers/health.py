"""`HealthPages`: whether a server is alive, and whether it can run a program now, for load balancers.

A program runs in a cell to find that out, but at most one at a time and one a second, however many
clients ask: a flood of requests costs as much as one.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ...policies.errors import CellwrightError
from ...runner.concurrency import begin_thread
from ..text.terminal_text import harmless_line

METRICS, HEALTH = "--metrics", "--health"  # the options that name addresses of pages
TEXT = "text/plain; charset=utf-8"
FRESH_SECONDS = 1.0
BUDGET_SECONDS = 3.0  # load balancers wait for 2 to 10 seconds by default
Probe = Callable[[], None]  # returns once a program ran in a cell, or raises CellwrightError


class Readiness:
    """Says why a server takes no new requests; safe from many threads.

    Reports on stderr when programs cannot run any more, with the reason, and when they can again.
    """

    def __init__(
        self, probe: Probe | None = None, not_ready: Callable[[], str] = str,
        budget_seconds: float = BUDGET_SECONDS, fresh_seconds: float = FRESH_SECONDS,
    ) -> None:  # fmt: skip
        """`not_ready` returns why the server takes no requests apart from cells, empty while it does.
        Without a `probe` no cell is tried."""
        self._probe = probe
        self._not_ready = not_ready
        self._budget_seconds = budget_seconds
        self._fresh_seconds = fresh_seconds
        self._changed = threading.Condition()
        self._began_at: float | None = None  # when the running try began
        self._ended_at = float("-inf")  # when the last try ended
        self._has_failed = False

    def why_not(self) -> str:
        """Return one or two words, empty if the server is ready; takes at most the budget."""
        if (why := self._not_ready()) or self._probe is None:
            return why
        return "" if self._can_run() else "no cell"

    def _can_run(self) -> bool:
        """Tell whether the last try succeeded, if it is fresh, or else the next one."""
        with self._changed:
            if self._began_at is None:
                if time.monotonic() - self._ended_at < self._fresh_seconds:
                    return not self._has_failed
                self._began_at = time.monotonic()
                try:
                    begin_thread("cellwright-ready", self._try)
                except CellwrightError as error:
                    self._end(error)
                    return False
            began_at = self._began_at
            left = began_at + self._budget_seconds - time.monotonic()
            ended = self._changed.wait_for(lambda: self._began_at != began_at, max(0.0, left))
            return ended and not self._has_failed

    def _try(self) -> None:
        error: Exception | None = None
        try:
            if self._probe:
                self._probe()
        except Exception as caught:  # noqa: BLE001 - a bug, too, means that no program runs
            error = caught
        with self._changed:
            has_changed = self._has_failed != (error is not None)
            self._end(error)
        if has_changed:  # last: stderr may have a reader that waits
            why = f"not ready: {harmless_line(str(error))}" if error else "ready again"
            sys.stderr.write(f"cellwright: {why}\n")

    def _end(self, error: Exception | None) -> None:
        self._has_failed = error is not None
        self._began_at, self._ended_at = None, time.monotonic()
        self._changed.notify_all()


class OperatorsPage(NamedTuple):
    """An answer: the status of HTTP, its type, and its body."""

    status: int
    type: str
    body: bytes


class HealthPages:
    """Answers by path; safe from many threads.

    `is_well` tells whether the server still answers anything.
    """

    paths: tuple[str, ...] = ("/healthz", "/readyz")
    is_public = True  # any client may read them, under any name of this host

    def __init__(self, readiness: Readiness, is_well: Callable[[], bool] = lambda: True) -> None:
        self._readiness = readiness
        self._is_well = is_well

    def answer(self, path: str) -> OperatorsPage:
        """Return the page of a path, without its query; a 404 for any other."""
        if path == "/healthz":
            well = self._is_well()
            return OperatorsPage(200 if well else 503, TEXT, b"ok\n" if well else b"stuck\n")
        if path == "/readyz":
            why = self._readiness.why_not()
            return OperatorsPage(503 if why else 200, TEXT, f"{why or 'ready'}\n".encode())
        return OperatorsPage(404, TEXT, f"not found: one of {' '.join(self.paths)}\n".encode())

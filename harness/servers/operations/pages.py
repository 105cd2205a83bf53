"""`OperatorsPages`: the answers to /healthz, /readyz and /metrics, over whatever carries HTTP."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ....policies.errors import CellwrightError, PolicyError
from ....policies.extras import how_to_install
from .measurements import Measurements

PATHS = ("/healthz", "/readyz", "/metrics")
_TEXT = "text/plain; charset=utf-8"
_FRESH_SECONDS = 1.0  # scrapes within it get the same text: a flood of them costs one


class OperatorsPage(NamedTuple):
    """An answer: the status of HTTP, its type, and its body."""

    status: int
    type: str
    body: bytes


class OperatorsPages:
    """Answers by path; safe from many threads.

    `not_ready` returns why the server takes no new requests, empty while it does.  `is_well` tells
    whether it still answers anything.
    """

    def __init__(
        self, measurements: Measurements, not_ready: Callable[[], str] = str,
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Raise PolicyError without the extra `metrics`."""
        try:
            from .prometheus import CONTENT_TYPE, PrometheusText
        except ModuleNotFoundError as error:
            raise PolicyError(
                f"metrics: the package {error.name} is not installed",
                how_to_install("metrics"),
            ) from None
        self._type = CONTENT_TYPE
        self._text = PrometheusText(measurements)
        self._not_ready = not_ready
        self._is_well = is_well
        self._lock = threading.Lock()
        self._rendered = b""
        self._rendered_at = -_FRESH_SECONDS

    def answer(self, path: str) -> OperatorsPage:
        """Return the page of a path, without its query; a 404 for any other."""
        if path == "/healthz":
            well = self._is_well()
            return OperatorsPage(200 if well else 503, _TEXT, b"ok\n" if well else b"stuck\n")
        if path == "/readyz":
            why = self._not_ready()
            return OperatorsPage(503 if why else 200, _TEXT, f"{why or 'ready'}\n".encode())
        if path == "/metrics":
            return self._metrics()
        return OperatorsPage(404, _TEXT, f"not found: one of {' '.join(PATHS)}\n".encode())

    def _metrics(self) -> OperatorsPage:
        with self._lock:
            if time.monotonic() - self._rendered_at >= _FRESH_SECONDS:
                try:
                    self._rendered = self._text.render()
                except CellwrightError as error:  # a sandbox was closed meanwhile
                    return OperatorsPage(503, _TEXT, f"{error.what}\n".encode())
                self._rendered_at = time.monotonic()
            return OperatorsPage(200, self._type, self._rendered)

"""`RequestLog`: one line of JSON for each request to a server, in a file or on stderr;
`RequestsMiddleware` counts and logs the requests of an HTTP server.  `OperatorsPages` has the answers
to /metrics and those of health.py, over whatever carries HTTP, and `ServerRecords` all that operators
asked of a server.
"""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import CellwrightError, PolicyError
from ...policies.extras import how_to_install
from ...runner.audit.log import AuditLog, OnEntry
from ...runner.audit.record import AuditEntry, plain
from .health import HEALTH, METRICS, TEXT, HealthPages, OperatorsPage, Probe, Readiness
from .measurements import OTHER, Measurements

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
        """Append a line; `more`: further facts about the request, whose texts are escaped and cut."""
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


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNFINISHED = "unfinished"  # the client was gone, or the server ended


class RequestsMiddleware:
    """ASGI middleware, the outermost; `server` names the server in labels and lines.

    A streamed answer counts when it ends.  `client_key`: where the application notes a client's name in
    the scope of its request.
    """

    def __init__(
        self, app: App, server: str, measurements: Measurements, log: RequestLog | None,
        client_key: str,
    ) -> None:  # fmt: skip
        self._app = app
        self._server = server
        self._measurements = measurements
        self._log = log
        self._client_key = client_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        outcome = _UNFINISHED
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status, outcome
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                outcome = str(status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._note(scope, outcome, time.monotonic() - begun)

    def _note(self, scope: Scope, outcome: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._measurements.note_request(f"{self._server} {method}", outcome, seconds)
        if self._log:
            client: LogValue = scope.get(self._client_key)
            path = str(scope.get("path", ""))
            self._log.note(self._server, method, outcome, seconds, client=client, path=path)


class OperatorSettings(NamedTuple):
    """A file or address each; None for nothing of the kind."""

    audit: str | None = None
    metrics: str | None = None
    request_log: str | None = None
    opentelemetry: bool = False
    health: str | None = None


class ServerRecords(NamedTuple):
    """The outputs of a server; `trail` and `log` are None if not needed."""

    measurements: Measurements
    trail: AuditLog | None
    log: RequestLog | None


@contextlib.contextmanager
def observing(
    settings: OperatorSettings, measurements: Measurements, *others: OnEntry
) -> Iterator[ServerRecords]:
    """Open the trail and the log during the block; raises PolicyError and AuditError.

    `others` are called with each record too. The trail keeps no entries in memory, because no client
    can ask a server for them.
    """
    with contextlib.ExitStack() as stack:
        listeners = [*others]
        if settings.metrics or settings.opentelemetry:
            listeners.append(measurements)
        if settings.opentelemetry:
            from .telemetry import exporting  # the SDK takes 200 ms to import

            listeners.append(stack.enter_context(exporting(measurements)))

        def tell(entry: AuditEntry) -> None:
            for each in listeners:
                each(entry)

        trail = log = None
        if listeners or settings.audit:
            told = tell if listeners else None
            trail = stack.enter_context(AuditLog(path=settings.audit, max_entries=0, on_entry=told))
        if settings.request_log:
            log = stack.enter_context(contextlib.closing(RequestLog(settings.request_log)))
        yield ServerRecords(measurements, trail, log)


@contextlib.contextmanager
def serving_operators(
    settings: OperatorSettings, measurements: Measurements, probe: Probe | None,
    not_ready: Callable[[], str] = str, is_well: Callable[[], bool] = lambda: True, group: int = -1,
) -> Iterator[None]:  # fmt: skip
    """Answer the pages of operators at the addresses of the settings during the block.

    `probe` runs a program in a cell; `not_ready` returns why the server takes no new requests.
    """
    readiness = Readiness(probe, not_ready)
    with contextlib.ExitStack() as stack:
        if settings.metrics is not None:
            pages = OperatorsPages(measurements, readiness, is_well)
            serving = _endpoint(METRICS).serving_pages(settings.metrics, pages, group, METRICS)
            stack.enter_context(serving)
        if settings.health is not None:
            health = HealthPages(readiness, is_well)
            serving = _endpoint(HEALTH).serving_pages(settings.health, health, group, HEALTH)
            stack.enter_context(serving)
        yield


def check_addresses(settings: OperatorSettings) -> None:
    """Raise PolicyError if this host cannot serve the pages of operators as the settings say."""
    if settings.metrics is not None:
        OperatorsPages(Measurements())
        _endpoint(METRICS).check_address(settings.metrics, METRICS)
    if settings.health is not None:
        _endpoint(HEALTH).check_address(settings.health, HEALTH)


_EXTRAS = {METRICS: "metrics", HEALTH: "web"}


def _endpoint(option: str) -> ModuleType:
    """Return the module of the HTTP server, which needs an extra; raises PolicyError without it."""
    try:
        return import_module(".operators_endpoint", __package__)
    except ModuleNotFoundError as error:
        raise without_extra(error, option) from None


_FRESH_SECONDS = 1.0  # scrapes within this time get the same text: many cost as little as one


def without_extra(error: ModuleNotFoundError, option: str = METRICS) -> PolicyError:
    """Return the error of a host without the extra that an option needs."""
    what = f"{option}: the package {error.name} is not installed"
    return PolicyError(what, how_to_install(_EXTRAS[option]))


class OperatorsPages(HealthPages):
    """The pages of health, and /metrics."""

    paths = (*HealthPages.paths, "/metrics")
    is_public = False

    def __init__(
        self, measurements: Measurements, readiness: Readiness | None = None,
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Raise PolicyError without the extra `metrics`."""
        super().__init__(readiness or Readiness(), is_well)
        try:
            from .prometheus import CONTENT_TYPE, PrometheusText
        except ModuleNotFoundError as error:
            raise without_extra(error) from None
        self._type = CONTENT_TYPE
        self._text = PrometheusText(measurements)
        self._lock = threading.Lock()
        self._rendered = b""
        self._rendered_at = -_FRESH_SECONDS

    def answer(self, path: str) -> OperatorsPage:
        """Return the page of a path, without its query; a 404 for any other."""
        return self._metrics() if path == "/metrics" else super().answer(path)

    def _metrics(self) -> OperatorsPage:
        with self._lock:
            if time.monotonic() - self._rendered_at >= _FRESH_SECONDS:
                try:
                    self._rendered = self._text.render()
                except CellwrightError as error:  # a sandbox was closed meanwhile
                    return OperatorsPage(503, TEXT, f"{error.what}\n".encode())
                self._rendered_at = time.monotonic()
            return OperatorsPage(200, self._type, self._rendered)
